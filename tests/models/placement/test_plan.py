from __future__ import annotations

import json

import pytest

from traincast.hardware.platform import load_platform
from traincast.models.embeddings import Pooling, Table
from traincast.models.placement import Placement, Plan, check_plan
from traincast.models.placement.memory import MemoryLimits
from traincast.models.placement.options import Option, find_option, list_table_options
from traincast.models.placement.plan import convert_plan_to_json, load_plans, read_plan_from_json, simplify_plan
from traincast.planner.sharding.result import make_task
from traincast.utils.errors import TraincastError


def _table(name="user", **changes):
    fields = {"name": name, "rows": 1000, "dim": 64, "pooling": Pooling.from_constant(5)}
    return Table(**{**fields, **changes})


TABLES = (_table("a"), _table("b", rows=10, dim=32))
WHOLE = Placement("table_wise", (1,))


def _plan(first=WHOLE, second=WHOLE, world_size=4, names=("a", "b")):
    return Plan(names, (first, second), world_size)


def test_a_plan_in_another_order_is_put_in_that_of_the_tables():
    other = Placement("table_wise", (3,))
    checked = check_plan(_plan(other, WHOLE, names=("b", "a")), TABLES, 4, 8)
    assert checked == _plan(WHOLE, other)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (_plan(world_size=8), "the plan is for 8 ranks, not 4"),
        (_plan(names=("a", "c")), "does not place table 'b'"),
        (Plan(("a", "b", "c"), (WHOLE,) * 3, 4), "places table 'c', which is not one of these"),
        (_plan(names=("a", "a")), "places table 'a' 2 times"),
        (Plan(("a", "b"), (WHOLE,), 4), "2 tables but 1 placements"),
        (_plan(Placement("table_wise", (4,))), "table 'a': table_wise on rank 4; there are ranks 0 to 3"),
        (_plan(Placement("table_wise", (-1,))), "table 'a': table_wise on rank -1"),
        (_plan(Placement("table_wise", (0, 1))), "table 'a': table_wise on 2 ranks; give one"),
        (_plan(Placement("table_wise", ())), "table 'a': table_wise on 0 ranks"),
        (_plan(Placement("table_wise", (0,), "dense")), "'dense' is for data_parallel"),
        (_plan(Placement("data_parallel", (0, 1, 2, 3))), "'dense' is for data_parallel"),
        (_plan(Placement("row_wise", (0, 1))), "table 'a': row_wise must list all 4 ranks in order"),
        (_plan(Placement("row_wise", (1, 0, 2, 3))), "table 'a': row_wise must list all 4 ranks in order"),
        (_plan(Placement("column_wise", (0, 1, 2))), "table 'a': column_wise in 3 slices of dim 64"),
        (_plan(Placement("column_wise", (0,) * 32)), "table 'a': column_wise in 32 slices of dim 64"),
        (_plan(Placement("column_wise", ())), "table 'a': column_wise on no rank"),
        (_plan(Placement("table_row_wise", (1, 2))), "table 'a': table_row_wise must list the ranks of one node"),
        (_plan(Placement("table_row_wise", ())), "table 'a': table_row_wise must list"),
        (_plan(Placement("table_wise", (0,), "fused_uvm_caching")), "table 'a'.*cache_fraction 0"),
        (_plan(Placement("table_wise", (0,), "fused", 0.2)), "table 'a'.*cache_fraction 0.2"),
        (_plan(Placement("table_wise", (0,), "fused_uvm_caching", float("nan"))), "table 'a'.*cache_fraction nan"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(plan, message):
    with pytest.raises(TraincastError, match=message):
        check_plan(plan, TABLES, 4, 2)


def test_shards_cover_every_element_of_a_table_once():
    tables = (_table("a", rows=10), _table("b", dim=64), _table("c"), _table("d"))
    plan = Plan(
        ("a", "b", "c", "d"),
        (
            Placement.make_row_wise(4),
            Placement("column_wise", (2, 0, 2, 1)),
            Placement("table_row_wise", (2, 3)),
            Placement.make_data_parallel(4),
        ),
        4,
    )
    check_plan(plan, tables, 4, 2)
    shards = plan.make_shards(tables)
    rows = [(s.rank, s.rows) for s in shards if s.table == 0]
    assert rows == [(0, (0, 3)), (1, (3, 6)), (2, (6, 9)), (3, (9, 10))]
    assert [(s.rank, s.columns) for s in shards if s.table == 1] == [
        (2, (0, 16)), (0, (16, 32)), (2, (32, 48)), (1, (48, 64)),
    ]  # fmt: skip
    assert [(s.rank, s.rows) for s in shards if s.table == 2] == [(2, (0, 500)), (3, (500, 1000))]
    for table in (0, 1, 2):
        area = sum(s.height * s.width for s in shards if s.table == table)
        assert area == tables[table].rows * tables[table].dim
    assert [(s.rank, s.height, s.width) for s in shards if s.table == 3] == [(r, 1000, 64) for r in range(4)]


def test_a_table_with_fewer_rows_than_ranks_has_empty_shards():
    shards = Plan(("a",), (Placement.make_row_wise(4),), 4).make_shards((_table("a", rows=2),))
    assert [shard.height for shard in shards] == [1, 1, 0, 0]


def test_a_plan_survives_its_file(tmp_path):
    plan = _plan(Placement("column_wise", (0, 3)), Placement("table_wise", (2,), "fused_uvm_caching", 0.25))
    file = tmp_path / "best.json"
    file.write_text(json.dumps(convert_plan_to_json(plan)))
    assert load_plans(file) == {"best": plan}
    several = tmp_path / "plans.yaml"
    several.write_text(json.dumps({"plans": {"x": convert_plan_to_json(plan), "y": convert_plan_to_json(_plan())}}))
    assert load_plans(several) == {"x": plan, "y": _plan()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "give 'world_size' and 'tables'"),
        ({"world_size": 4, "tables": {}, "more": 1}, "and nothing else"),
        ({"world_size": 0, "tables": {"a": {}}}, "world_size 0"),
        ({"world_size": True, "tables": {"a": {}}}, "world_size True"),
        ({"world_size": 4, "tables": []}, "'tables' must map"),
        ({"world_size": 4, "tables": {"a": {"kind": "row_wise"}}}, "table 'a': give kind and ranks"),
        ({"world_size": 4, "tables": {"a": {"kind": "x", "ranks": "0"}}}, "table 'a': ranks '0'"),
        ({"world_size": 4, "tables": {"a": {"kind": "x", "ranks": [0.5]}}}, r"table 'a': ranks \[0.5\]"),
        ({"world_size": 4, "tables": {"a": {"kind": "x", "ranks": [0], "cache_fraction": "y"}}}, "cache_fraction 'y'"),
    ],
)
def test_a_wrong_file_is_refused(content, message):
    with pytest.raises(TraincastError, match=message):
        read_plan_from_json(content)


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    for name, text in (("x.json", "{"), ("x.yaml", "a: [")):
        (tmp_path / name).write_text(text)
        with pytest.raises(TraincastError, match=r"not (JSON|valid YAML)"):
            load_plans(tmp_path / name)
    with pytest.raises(TraincastError, match="cannot be read"):
        load_plans(tmp_path / "none.json")


def test_options_become_placements_and_back():
    limits = MemoryLimits(device=40e9)
    options = list_table_options([_table("a", dim=128)], limits, 8, 4)[0]
    assert {option.kind for option in options} == {
        "table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel",
    }  # fmt: skip
    assert [option.slices for option in options if option.kind == "column_wise"] == [1, 2, 4]
    for option in options:
        placement = option.make_placement([1] * option.slices, 8, 4)
        assert find_option(placement) == option
        check_plan(Plan(("a",), (placement,), 8), (_table("a", dim=128),), 8, 4)


def test_host_memory_is_an_option_only_when_devices_are_full():
    big = _table("big", rows=100_000_000, dim=128)
    roomy = list_table_options([big], MemoryLimits(device=80e9), 8, 8)[0]
    tight = list_table_options([big], MemoryLimits(device=8e9), 8, 8)[0]
    assert not any(option.kernel.startswith("fused_uvm") for option in roomy)
    assert Option("table_wise", 1, "fused_uvm") in tight


def test_single_slices_of_columns_are_whole_tables():
    one, two = Placement("column_wise", (1,)), Placement("column_wise", (0, 1))
    copied = Placement.make_data_parallel(2)
    alone = Plan(("a", "b"), (one, copied), 2)
    assert simplify_plan(alone).placements == (Placement("table_wise", (1,)), copied)
    beside = Plan(("a", "b"), (one, two), 2)
    assert simplify_plan(beside) == beside


def test_a_table_without_an_optimizer_is_refused_by_name():
    table = Table(name="user", rows=1000, dim=16, pooling=Pooling.from_constant(2), optimizer="none")
    with pytest.raises(TraincastError, match=r"'user' has optimizer 'none'.*rowwise_adagrad"):
        make_task([table], load_platform("dgx-a100"), gpus=2, batch_size=128)

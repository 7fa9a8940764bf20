"""Plans as JSON: round trips, and rejection of everything that is not one."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.torchrec.conftest import refusal
from traincast.models.embeddings import Pooling, Table
from traincast.models.placement.plan import Placement, Plan
from traincast.planner.torchrec.plans import load_plan, plan_from_json, plan_to_json
from traincast.planner.torchrec.tables import default_modules
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import parse_json

WORLD = {"world_size": 4, "gpus_per_node": 2}


@pytest.fixture
def written(tables, plan):
    return plan_to_json(plan, tables, gpus_per_node=2, modules=default_modules(tables))


def test_a_plan_survives_being_written_and_read(tables, plan, written):
    read = plan_from_json(json.loads(json.dumps(written)), tables, **WORLD)

    assert read == plan


def test_reading_and_writing_json_needs_neither_torch_nor_torchrec():
    code = (
        "import sys, traincast.planner.torchrec, traincast.planner.torchrec.planner\n"
        "import traincast.planner.torchrec.estimator\n"
        "print([name for name in ('torch', 'torchrec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_layout_is_torchrecs(written):
    assert written["plan"]["embedding_bag_collection"]["t0"] == {
        "sharding_type": "table_wise",
        "compute_kernel": "fused",
        "ranks": [1],
        "shards": [{"shard_offsets": [0, 0], "shard_sizes": [1000, 32], "placement": "rank:1/cuda:1"}],
    }
    assert "shards" not in written["plan"]["weighted_embedding_bag_collection"]["t3"]


def test_a_plan_without_the_outer_key_and_with_sharding_specs_is_read(tables, plan, written):
    modules = written["plan"]
    for parameters in modules.values():
        for parameter in parameters.values():
            parameter["sharding_spec"] = {"shards": parameter.pop("shards")} if "shards" in parameter else None

    assert plan_from_json(modules, tables, **WORLD) == plan


def test_table_column_wise_is_column_wise(tables, plan, written):
    written["plan"]["embedding_bag_collection"]["t2"]["sharding_type"] = "table_column_wise"

    assert plan_from_json(written, tables, **WORLD) == plan


def test_ranks_may_be_left_out(tables, plan, written):
    for parameters in written["plan"].values():
        for parameter in parameters.values():
            parameter["ranks"] = None

    assert plan_from_json(written, tables, **WORLD) == plan


def test_a_cache_without_a_size_has_torchrecs(tables, written):
    written["plan"]["embedding_bag_collection"]["t4"]["cache_params"] = None

    assert plan_from_json(written, tables, **WORLD).get_placement("t4").cache_fraction == 0.2


def test_more_ranks_than_rows(tables):
    small = (Table(name="few", rows=5, dim=8, pooling=Pooling.from_constant(1.0)),)
    plan = Plan(("few",), (Placement.make_row_wise(4),), 4)
    written = plan_to_json(plan, small, gpus_per_node=4, modules={"few": "m"})

    sizes = [shard["shard_sizes"][0] for shard in written["plan"]["m"]["few"]["shards"]]

    assert sizes == [2, 2, 1, 0]
    assert plan_from_json(written, small, world_size=4, gpus_per_node=4) == plan


@pytest.mark.parametrize(
    ("table", "change", "complaint"),
    [
        ("t0", {"sharding_type": "table_wisee"}, "unknown sharding_type of table 't0' 'table_wisee'"),
        ("t0", {"sharding_type": "grid_shard"}, "grid_shard"),
        ("t0", {"sharding_type": ["table_wise"]}, "sharding_type of table 't0'"),
        ("t0", {"compute_kernel": "quant"}, "unknown compute_kernel of table 't0' 'quant'"),
        ("t0", {"compute_kernel": "dense"}, "table 't0': table_wise with kernel 'dense'"),
        ("t0", {"ranks": [4]}, "table 't0': ranks is 4; give an integer from 0 to 3"),
        ("t0", {"ranks": [True]}, "table 't0': ranks is True"),
        ("t0", {"ranks": "1"}, "table 't0': ranks is '1'; give a list"),
        ("t0", {"ranks": [2]}, "on rank 1; table_wise has rows (0, 1000) and columns (0, 32) on rank 2"),
        ("t0", {"shards": None}, "table 't0': table_wise without shards"),
        ("t0", {"shards": []}, "table 't0': 0 shards for 1 ranks"),
        ("t0", {"colour": "red"}, "unknown field 'colour'"),
        ("t0", {"key_value_params": {"a": 1}}, "table 't0': key_value_params"),
        ("t0", {"output_dtype": "FP16"}, "table 't0': output_dtype 'FP16' cannot be represented"),
        ("t1", {"ranks": [0, 1, 3, 2]}, "table 't1': row_wise must list all 4 ranks in order"),
        ("t2", {"ranks": [0, 0, 3]}, "table 't2': column_wise in 3 slices of dim 32"),
        ("t4", {"ranks": [1, 2]}, "table 't4': table_row_wise must list the ranks of one node"),
        ("t4", {"cache_params": {"load_factor": "much"}}, "table 't4': load_factor is 'much'"),
        ("t4", {"cache_params": {"load_factor": 1.5}}, "table 't4': table_row_wise has cache_fraction 1.5"),
        ("t4", {"cache_params": {"reserved_memory": 5}}, "table 't4': cache_params reserved_memory"),
        ("t4", {"cache_params": 0.2}, "table 't4': cache_params is 0.2; give an object"),
    ],
)
def test_a_wrong_field_is_refused_by_name(tables, written, table, change, complaint):
    written["plan"]["embedding_bag_collection"][table] |= change

    with pytest.raises(TraincastError) as raised:
        plan_from_json(written, tables, **WORLD)

    assert complaint in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"placement": "gpu 3"}, "shard placement is 'gpu 3'; give it as 'rank:0/cuda:0'"),
        ({"placement": None}, "shard placement is None"),
        ({"shard_sizes": [1000]}, "shard_sizes has 1 numbers"),
        ({"shard_sizes": [1000, 10**30]}, "shard size is 1000000"),
        ({"shard_offsets": [0.5, 0]}, "shard offset is 0.5; give an integer"),
        ({"shard_offsets": [-1, 0]}, "shard offset is -1"),
        ({"shard_sizes": [999, 32]}, "has rows (0, 999)"),
        ({"stride": 1}, "unknown field 'stride'"),
    ],
)
def test_a_wrong_shard_is_refused(tables, written, change, complaint):
    written["plan"]["embedding_bag_collection"]["t0"]["shards"][0] |= change

    with pytest.raises(TraincastError) as raised:
        plan_from_json(written, tables, **WORLD)

    assert "table 't0'" in str(raised.value) and complaint in str(raised.value)


def test_a_plan_for_others_is_refused(tables, written):
    with pytest.raises(TraincastError, match="table 't5', which is not one of these"):
        plan_from_json(written, tables[:5], **WORLD)
    with pytest.raises(TraincastError, match="ranks is 3; give an integer from 0 to 2"):
        plan_from_json(written, tables, world_size=3, gpus_per_node=3)
    parameters = written["plan"]["embedding_bag_collection"]
    parameters["t6"] = parameters.pop("t5")
    with pytest.raises(TraincastError, match="places table 't6'"):
        plan_from_json(written, tables, **WORLD)
    written["plan"]["other"] = {"t0": parameters["t0"]}
    del parameters["t6"]
    with pytest.raises(TraincastError, match="table 't0' is in two modules"):
        plan_from_json(written, tables, **WORLD)


def test_a_plan_that_torchrec_would_refuse_is_not_written(tables):
    plan = Plan(("t0",), (Placement("table_wise", (0,), "fused_uvm_caching", 1.0),), 4)
    with pytest.raises(TraincastError, match="'t0' caches all of its rows"):
        plan_to_json(plan, tables[:1], gpus_per_node=2, modules=default_modules(tables))
    with pytest.raises(TraincastError, match="'t0' has no module"):
        plan_to_json(Plan(("t0",), (Placement("table_wise", (0,)),), 4), tables[:1], gpus_per_node=2, modules={})


def test_a_file_that_is_not_a_plan_is_refused(tables, tmp_path):
    file = tmp_path / "plan.json"
    for content, complaint in (
        ("{", "not JSON"),
        ('{"plan": NaN}', "'plan' is nan"),
        ('{"plan": {}, "plan": {}}', "key 'plan' stands there twice"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 10_000, "digits"),
        ("[]", "give an object"),
        ('{"plan": {}}', "has no modules"),
    ):
        file.write_text(content)
        with pytest.raises(TraincastError, match=complaint) as raised:
            load_plan(file, tables, **WORLD)
        assert str(raised.value).count(str(file)) == 1
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraincastError, match=r"not UTF-8 text|cannot be read"):
        load_plan(file, tables, **WORLD)
    with pytest.raises(TraincastError, match=r"not UTF-8 text|cannot be read"):
        load_plan(tmp_path / "absent.json", tables, **WORLD)


def placements(dim: int):
    kernels = st.sampled_from(
        [("fused", 0.0), ("fused_uvm", 0.0), ("fused_uvm_caching", 0.1), ("fused_uvm_caching", 0.99)]
    )
    slices = st.sampled_from([n for n in (1, 2, 4, 8) if dim % (4 * n) == 0])
    ranks = st.integers(0, 7)
    sharded = st.one_of(
        ranks.map(lambda rank: ("table_wise", (rank,))),
        st.just(("row_wise", tuple(range(8)))),
        st.integers(0, 1).map(lambda node: ("table_row_wise", tuple(range(4 * node, 4 * node + 4)))),
        slices.flatmap(lambda n: st.tuples(*[ranks] * n)).map(lambda chosen: ("column_wise", chosen)),
    )
    return st.one_of(
        st.tuples(sharded, kernels).map(lambda both: Placement(*both[0], *both[1])),
        st.just(Placement.make_data_parallel(8)),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_plan_survives_being_written_and_read(data):
    sizes = data.draw(
        st.lists(st.tuples(st.integers(1, 10**9), st.sampled_from([4, 8, 32, 48])), min_size=1, max_size=5)
    )
    tables = [
        Table(name=f"t{i}", rows=rows, dim=dim, pooling=Pooling.from_constant(1.0))
        for i, (rows, dim) in enumerate(sizes)
    ]
    plan = Plan(tuple(table.name for table in tables), tuple(data.draw(placements(table.dim)) for table in tables), 8)
    written = plan_to_json(plan, tables, gpus_per_node=4, modules=default_modules(tables))

    assert plan_from_json(json.loads(json.dumps(written)), tables, world_size=8, gpus_per_node=4) == plan


SCRAPS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["rank:0/cuda:0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def everywhere(content, path=()):
    yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from everywhere(value, (*path, key))
    elif isinstance(content, list):
        for position, value in enumerate(content):
            yield from everywhere(value, (*path, position))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_one_broken_spot_is_read_or_refused_but_never_a_traceback(data):
    tables = [Table(name=f"t{i}", rows=100, dim=8, pooling=Pooling.from_constant(1.0)) for i in range(3)]
    kinds = (
        Placement.make_row_wise(4),
        Placement("column_wise", (0, 3)),
        Placement("table_wise", (2,), "fused_uvm_caching", 0.5),
    )
    plan = Plan(tuple(table.name for table in tables), kinds, 4)
    content = copy.deepcopy(plan_to_json(plan, tables, gpus_per_node=2, modules=default_modules(tables)))
    path = data.draw(st.sampled_from(list(everywhere(content))))
    scrap = data.draw(SCRAPS)
    if path:
        place = content
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = scrap
    else:
        content = scrap

    assert "\n" not in refusal(lambda: plan_from_json(content, tables, **WORLD))


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='{}[]":,0123456789.eE-truefalsn\\u ', max_size=40))
def test_any_text_is_json_or_refused(text):
    complaint = refusal(lambda: parse_json(text, "here"))

    assert not complaint or complaint.startswith("here: ")

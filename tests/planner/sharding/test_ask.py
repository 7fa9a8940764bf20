"""Tables, dense parts and plans from names and files."""

from __future__ import annotations

import json

import pytest

from traincast.models.placement.plan import Plan
from traincast.planner.sharding import search as sharding
from traincast.planner.sharding.search import (
    TORCHREC,
    describe_assumed_links,
    load_candidates,
    load_task,
    make_torchrec_rival,
)
from traincast.simulator.scenario.tables import load_dense
from traincast.utils.errors import TraincastError

TABLES = "tables:\n  - {name: user, rows: 1000, dim: 64}\n  - {name: item, rows: 500, dim: 64}\n"


@pytest.fixture
def tables(tmp_path):
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    return str(path)


def written(tmp_path, text, name="dense.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_task_has_tables_platform_and_size(tables):
    task = load_task(tables, on="dgx-a100", gpus=4, batch_size=128)[0]

    assert [table.name for table in task.tables] == ["user", "item"]
    assert (task.platform.key, task.gpus, task.batch_size) == ("dgx-a100", 4, 128)


def test_one_type_for_all_tables(tables):
    assert {table.dtype for table in load_task(tables, on="dgx-a100", gpus=2, batch_size=8)[0].tables} == {"fp32"}
    task = load_task(tables, on="dgx-a100", gpus=2, batch_size=8, dtype="fp16")[0]
    assert {table.dtype for table in task.tables} == {"fp16"}


@pytest.mark.parametrize(("on", "gpus", "said"), [("dgx-a100", 2, 0), ("a100-40gb", 1, 0), ("a100-40gb", 2, 1)])
def test_links_of_a_device_alone_are_assumed_and_said(tables, on, gpus, said):
    assert len(describe_assumed_links(load_task(tables, on=on, gpus=gpus, batch_size=8)[0])) == said


def test_a_dense_part_by_its_fields(tmp_path):
    dense = load_dense(written(tmp_path, "bottom_mlp: [13, 64]\ntop_mlp: [32, 1]\noptimizer: adam\n"))

    assert (dense.bottom_mlp, dense.top_mlp, dense.optimizer) == ((13, 64), (32, 1), "adam")


def test_a_dense_part_of_a_whole_dlrm(tmp_path):
    text = "bottom_mlp: [4, 16]\ntop_mlp: [8, 1]\nembedding_dim: 16\nrows_per_table: [10]\nlookups_per_table: 1\n"

    assert load_dense(written(tmp_path, text)).bottom_mlp == (4, 16)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bottom_mlp: [4]\n", "give bottom_mlp and top_mlp"),
        ("[1, 2]\n", "give bottom_mlp and top_mlp"),
        ("bottom_mlp: [4]\ntop_mlp: 3\n", "field 'top_mlp' must be a list of 1 to 100 integers, got 3"),
        ("bottom_mlp: [0]\ntop_mlp: [1]\n", "field 'bottom_mlp' takes integers from 1 to .*, got 0"),
        ("bottom_mlp: [true]\ntop_mlp: [1]\n", "field 'bottom_mlp' takes integers from 1 to .*, got True"),
        ("bottom_mlp: [4]\ntop_mlp: [1]\nlosses: bce\n", "unknown field 'losses'. Did you mean loss"),
    ],
)
def test_a_dense_part_that_is_wrong_names_what_to_change(tmp_path, text, said):
    with pytest.raises(TraincastError, match=said):
        load_dense(written(tmp_path, text))


def test_candidates_of_our_own_by_name(tables, tmp_path):
    plan = {"world_size": 2, "tables": {name: {"kind": "table_wise", "ranks": [0]} for name in ("user", "item")}}
    task = load_task(tables, on="dgx-a100", gpus=2, batch_size=8)[0]

    one = load_candidates(written(tmp_path, json.dumps(plan), "one.json"), task)
    two = load_candidates(written(tmp_path, json.dumps({"plans": {"a": plan, "b": plan}}), "two.json"), task)

    assert (list(one), list(two)) == (["one"], ["a", "b"])
    assert all(isinstance(each, Plan) for each in two.values())


def test_without_torchrec_a_note_says_so(tables, monkeypatch):
    monkeypatch.setattr(sharding, "find_spec", lambda _: None)
    notes = []

    assert make_torchrec_rival(load_task(tables, on="dgx-a100", gpus=2, batch_size=8)[0], None, notes) == {}
    assert notes[0].startswith("TorchRec is not installed: its plan is not among those compared")


@pytest.mark.parametrize(("limit", "seconds"), [(None, 60), (0.2, 1), (7.4, 7), (500.0, 60)])
def test_torchrec_s_planner_gets_a_part_of_the_time(tables, monkeypatch, limit, seconds):
    planner = pytest.importorskip("traincast.planner.torchrec.planner")
    asked = []
    monkeypatch.setattr(sharding, "find_spec", lambda _: True)
    monkeypatch.setattr(planner, "plan_with_torchrec", lambda task, timeout_seconds: asked.append(timeout_seconds))

    assert list(make_torchrec_rival(load_task(tables, on="dgx-a100", gpus=2, batch_size=8)[0], limit, [])) == [TORCHREC]
    assert asked == [seconds]


def test_a_planner_that_fails_is_a_note(tables, monkeypatch):
    planner = pytest.importorskip("traincast.planner.torchrec.planner")

    def fails(task, timeout_seconds):
        raise TraincastError("no plan fits")

    monkeypatch.setattr(sharding, "find_spec", lambda _: True)
    monkeypatch.setattr(planner, "plan_with_torchrec", fails)
    notes = []

    assert make_torchrec_rival(load_task(tables, on="dgx-a100", gpus=2, batch_size=8)[0], None, notes) == {}
    assert notes == ["TorchRec's plan is not among those compared: no plan fits"]

"""The ranks of a prediction as text, JSON and a trace."""

from __future__ import annotations

import json

import pytest

from tests.simulator.rank_programs import RankProgram, predict
from traincast.app.report.chrome import make_chrome_trace
from traincast.app.report.prediction import format_prediction


def program(size):
    return (
        RankProgram().compute(size, 2).collective(group=(0, 1, 2), wait=False).compute(size).collective(group=(0, 1, 2))
    )


@pytest.fixture(scope="module")
def result():
    """Two ranks alike and one with more to compute."""
    return predict(program(1024), program(2048), ranks=(0, 0, 1))


def test_json_has_every_class_of_ranks(result):
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))

    assert document["gpus"] == 3
    assert [entry["ranks"] for entry in document["ranks"]] == [[0, 1], [2]]
    light, heavy = document["ranks"]
    assert light["waiting_ms"] > 0.9 * (heavy["compute_ms"] - light["compute_ms"]) > 0
    assert document["exposed_comm_ms"] == heavy["exposed_comm_ms"]
    assert document["imbalance"] > 0
    assert document["critical_path_ranks"][0]["rank"] == 2
    assert sum(entry["ms"] for entry in document["critical_path_ranks"]) == pytest.approx(document["iteration_ms"])


def test_one_gpu_is_one_rank():
    document = predict(RankProgram().compute(512)).to_dict()

    assert [entry["ranks"] for entry in document["ranks"]] == [[0]]
    assert document["exposed_comm_ms"] == 0


def test_page_names_the_ranks_and_who_holds_them_back(result):
    lines = format_prediction(result).splitlines()

    assert lines[0] == "small (training) on 3 x NVIDIA A100-SXM4-40GB, batch 1 per GPU"
    rows = [line for line in lines if line.startswith(("rank 2 ", "ranks 0, 1 "))]
    assert [row.split("  ")[0] for row in rows] == ["rank 2", "ranks 0, 1"]
    assert any("most of the critical path: aten::mm on rank 2" in line for line in lines)
    assert any(line.startswith("exposed communication") for line in lines)


def test_trace_has_processes_for_every_class_of_ranks(result):
    events = make_chrome_trace(result)["traceEvents"]

    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [
        "rank 0 and 1 like it: host", "rank 0 and 1 like it: device", "rank 2: host", "rank 2: device", "critical path",
    ]  # fmt: skip
    flows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(set(flows)) == len(flows)
    path = [e for e in events if e["ph"] == "X" and e["cat"] == "critical"]
    assert sum(e["dur"] for e in path) == pytest.approx(1e6 * result.iteration, rel=1e-6)
    assert {e["args"]["rank"] for e in path} == {2}


def test_collectives_end_at_the_same_time_on_all_ranks(result):
    events = make_chrome_trace(result)["traceEvents"]

    ends = {}
    for e in events:
        if e["ph"] == "X" and e["cat"] == "collective":
            ends.setdefault(e["pid"], []).append(e["ts"] + e["dur"])
    first, second = ends.values()
    assert first == pytest.approx(second, abs=1e-3)

"""The prediction page and its JSON."""

from __future__ import annotations

import json

import pytest

import traincast
from traincast.app.report.prediction import format_prediction
from traincast.simulator.prediction.result import rank_bounds, suggest_remedy

CONTRACT = {
    "iteration_ms", "interval_ms", "device_active_ms", "device_idle_ms", "host_ms", "exposed_comm_ms", "per_family",
    "estimated_ops", "out_of_domain_ops", "platform", "workload", "batch_size", "gpus",
}  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return traincast.predict("dlrm-default", on="v100", batch_size=1024, clock_mhz=1297)


def test_json_has_every_key_of_the_contract(result):
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))

    assert document.keys() >= CONTRACT
    assert document["batch_size"] == 1024
    assert document["gpus"] == 1
    assert document["platform"] == "v100"


def test_json_numbers_agree_with_each_other(result):
    document = result.to_dict()

    low, high = document["interval_ms"]
    assert 0 < low < document["iteration_ms"] < high
    assert document["device_active_ms"] + document["device_idle_ms"] == pytest.approx(document["iteration_ms"])
    # one stream: families add up to the active time, sources and phases too
    for part in ("per_family", "per_phase", "per_source"):
        assert sum(document[part].values()) == pytest.approx(document["device_active_ms"])
    assert sum(document["critical_path"].values()) == pytest.approx(document["iteration_ms"])


def test_page_names_what_was_asked_and_what_it_is_made_of(result):
    lines = format_prediction(result).splitlines()

    assert lines[0] == "dlrm-default (training) on Tesla V100-SXM2-16GB, SM clock locked at 1297 MHz, batch 1024"
    assert lines[1].startswith(f"{1e3 * result.iteration:.2f} ms per step (90 % interval ")
    assert lines[1].endswith("; fits, 2.96 of 16 GB.")
    # 8 tables of a million rows of 64 fp32; the MLPs' 2.5 M weights with their gradients
    (memory,) = [line for line in lines if line.startswith("allocated at the peak")]
    assert memory.startswith("allocated at the peak 2.10 GB of 16 GB: embedding table 2.05, activation 0.02, temporary")
    for word in (
        "device active",
        "device idle",
        "host busy",
        "critical path",
        "gemm",
        "embedding",
        "allocated at the peak",
    ):
        assert any(word in line for line in lines)


def test_a_pipeline_that_waits_for_its_stages_is_told_to_shorten_its_bubble():
    # given eight tensor-parallel ranks in four stages with two micro-batches per stage, in eager mode
    job = {"on": "dgx-h100", "gpus": 64, "tp": 8, "pp": 4, "global_batch": 16}

    few = traincast.predict("llama3-70b", **job)
    many = traincast.predict("llama3-70b", **(job | {"global_batch": 128}))

    # then the wait is the bubble's, not the host's, until there are micro-batches enough
    assert "is pipeline bubble" in suggest_remedy(few)
    assert "smaller `tp`" in suggest_remedy(many)
    assert "exposed tensor parallel communication" in [name for name, _ in rank_bounds(many)]


def test_a_step_whose_path_is_the_hosts_is_bound_by_it_under_a_layout_too():
    small = traincast.predict("mpt-125m", on="h100", micro_batch=1)

    assert small.path_by_activity["host"] > small.iteration / 2
    assert rank_bounds(small)[0][0] == "host"

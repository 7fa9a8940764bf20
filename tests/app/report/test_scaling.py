"""The scaling curve on the page and as data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import traincast
from traincast.app.report.choices import format_scaling
from traincast.simulator.scenario.scaling import ScalingCurve, ScalingPoint


def point(gpus, seconds, efficiency, *, exposed=0.0, warnings=()):
    result = SimpleNamespace(
        workload=SimpleNamespace(name="net", mode="training", seq_len=128, batch_size=32),
        platform=SimpleNamespace(key="node", device=SimpleNamespace(name="GPU 9000")),
        iteration=seconds,
        interval=(0.9 * seconds, 1.1 * seconds),
        exposed_comm=exposed,
        device_active=0.9 * seconds,
        memory=SimpleNamespace(peak_bytes=12_340_000_000),
        warnings=warnings,
    )
    return ScalingPoint(gpus, -(-gpus // 8), 32 * gpus, 32 * gpus / seconds, efficiency, result)


CURVE = ScalingCurve(
    "weak",
    (
        point(1, 0.5, 1.0),
        point(8, 0.52, 0.9615, exposed=0.004, warnings=("needs 2 GB", "left out")),
        point(16, 0.625, 0.8, exposed=0.1, warnings=("needs 3 GB", "joined as in node")),
    ),
)


def test_the_page_has_the_verdict_of_most_gpus_then_a_row_for_each_number():
    curve = traincast.scaling("dlrm-ddp", on="dgx-a100", gpus=(1, 8))
    title, verdict, trust, _, header, _, *rows = format_scaling(curve).splitlines()

    assert title == curve.title()
    assert verdict.startswith("8 GPUs: ") and "per step (90 % interval " in verdict and "fits, " in verdict
    assert trust.startswith("Efficiency ") and "of 1 GPU. " in trust and "xtrapolated" in trust
    assert header.split()[:4] == ["GPUs", "nodes", "batch", "per"]
    assert [row.split()[0] for row in rows[:2]] == ["1", "8"]


def test_warnings_that_differ_in_numbers_are_one():
    assert CURVE.warnings == ["needs 3 GB", "left out", "joined as in node"]


def test_the_data():
    data = CURVE.to_dict()
    assert data["warnings"] == ["needs 3 GB", "left out", "joined as in node"]
    assert (data["workload"], data["scaling"]) == ("net", "weak")
    assert data["rows"][1] == {
        "gpus": 8, "nodes": 1, "batch_size": 32, "global_batch": 256, "iteration_ms": 520.0,
        "interval_ms": pytest.approx([468.0, 572.0]), "throughput_samples_per_s": 256 / 0.52, "efficiency": 0.9615,
        "exposed_comm_ms": 4.0, "device_active_ms": 468.0, "peak_memory_gb": 12.34,
    }  # fmt: skip

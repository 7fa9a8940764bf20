"""The scaling curve on the page and as data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from traincast.app.report.scaling import format_scaling
from traincast.simulator.prediction.scaling import ScalingCurve, ScalingPoint


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


def test_the_page():
    assert format_scaling(CURVE).splitlines() == [
        "net (training) on GPU 9000, 128 tokens: weak scaling, batch of a GPU fixed",
        "",
        "GPUs  nodes  batch  per GPU  ms per step  90 % interval  samples/s  exposed comm  GB per GPU  efficiency",
        "────  ─────  ─────  ───────  ───────────  ─────────────  ─────────  ────────────  ──────────  ──────────  "
        + "─" * 20,
        "   1      1     32       32          500     450 to 550      64.00      0.000 ms        12.3      100.0%  "
        + "█" * 20,
        "   8      1    256       32          520     468 to 572        492       4.00 ms        12.3       96.2%  "
        + "█" * 19 + "▎",
        "  16      2    512       32          625     562 to 688        819        100 ms        12.3       80.0%  "
        + "█" * 16,
        "warning: needs 3 GB",
        "warning: left out",
        "warning: joined as in node",
    ]  # fmt: skip


def test_the_data():
    data = CURVE.to_dict()
    assert data["warnings"] == ["needs 3 GB", "left out", "joined as in node"]
    assert (data["workload"], data["scaling"]) == ("net", "weak")
    assert data["rows"][1] == {
        "gpus": 8, "nodes": 1, "batch_size": 32, "global_batch": 256, "iteration_ms": 520.0,
        "interval_ms": pytest.approx([468.0, 572.0]), "throughput_samples_per_s": 256 / 0.52, "efficiency": 0.9615,
        "exposed_comm_ms": 4.0, "device_active_ms": 468.0, "peak_memory_gb": 12.34,
    }  # fmt: skip

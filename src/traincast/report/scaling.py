"""A scaling curve as JSON and as a table."""

from __future__ import annotations

import re
from typing import Any

from traincast.display.text import bar, milliseconds, table
from traincast.prediction.scaling import ScalingCurve, ScalingPoint


def scaling_json(curve: ScalingCurve) -> dict[str, Any]:
    """The curve as plain data: one row per number of GPUs; keys are stable."""
    first = curve.points[0].answer
    return {
        "workload": first.workload.name,
        "platform": first.platform.key,
        "device": first.platform.device.name,
        "mode": first.workload.mode,
        "seq_len": first.workload.seq_len or None,
        "scaling": curve.kind,
        "rows": [_row(point) for point in curve.points],
        "warnings": _warnings(curve),
    }


def scaling_text(curve: ScalingCurve) -> str:
    """The curve as a table."""
    first = curve.points[0].answer
    fixed = "batch of a GPU fixed" if curve.kind == "weak" else "batch of all GPUs together fixed"
    sequence = f", {first.workload.seq_len} tokens" if first.workload.seq_len else ""
    title = f"{first.workload.name} ({first.workload.mode}) on {first.platform.device.name}{sequence}"
    header = ("GPUs", "nodes", "batch", "a GPU", "ms a step", "90 % interval", "samples/s", "exposed comm", "GB a GPU",
              "efficiency", "")  # fmt: skip
    rows = [
        (
            str(p.gpus), str(p.nodes), str(p.global_batch), str(p.answer.workload.batch_size),
            milliseconds(p.answer.iteration), " to ".join(milliseconds(limit) for limit in p.answer.interval),
            _rate(p.throughput), f"{milliseconds(p.answer.exposed_comm)} ms",
            f"{p.answer.memory.peak_bytes / 1e9:.1f}", f"{p.efficiency:.1%}", bar(p.efficiency, 20),
        )
        for p in curve.points
    ]  # fmt: skip
    lines = [f"{title}: {curve.kind} scaling, {fixed}", "", table(header, rows, right=range(10))]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in _warnings(curve))])


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.2f}"


def _row(point: ScalingPoint) -> dict[str, Any]:
    answer = point.answer
    return {
        "gpus": point.gpus,
        "nodes": point.nodes,
        "batch_size": answer.workload.batch_size,
        "global_batch": point.global_batch,
        "iteration_ms": 1e3 * answer.iteration,
        "interval_ms": [1e3 * limit for limit in answer.interval],
        "throughput_samples_per_s": point.throughput,
        "efficiency": point.efficiency,
        "exposed_comm_ms": 1e3 * answer.exposed_comm,
        "device_active_ms": 1e3 * answer.device_active,
        "peak_memory_gb": answer.memory.peak_bytes / 1e9,
    }


def _warnings(curve: ScalingCurve) -> list[str]:
    """Every warning once; of those that differ in numbers only, the last."""
    said = {re.sub(r"[\d.]+", "#", text): text for point in curve.points for text in point.answer.warnings}
    return list(said.values())

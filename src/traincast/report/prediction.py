"""A prediction as JSON and as a page for the terminal."""

from __future__ import annotations

from typing import Any

from traincast.display.text import bar, milliseconds, table
from traincast.prediction.prediction import Prediction
from traincast.prediction.step_path import seconds_by_what
from traincast.report.ranks import ranks_json, ranks_text

_MOST_OPS = 5


def prediction_json(p: Prediction) -> dict[str, Any]:
    """The answer as plain data; keys are stable."""
    return {
        "workload": p.workload.name,
        "platform": p.platform.key,
        "device": p.platform.device.name,
        "clock_mhz": p.platform.device.clock_mhz,
        "mode": p.workload.mode,
        "compiled": "compiled" in p.workload.meta,
        "batch_size": p.workload.batch_size,
        "seq_len": p.workload.seq_len or None,
        "gpus": p.gpus,
        "iteration_ms": 1e3 * p.iteration,
        "interval_ms": [1e3 * p.interval[0], 1e3 * p.interval[1]],
        "device_active_ms": 1e3 * p.device_active,
        "device_idle_ms": 1e3 * p.device_idle,
        "host_ms": 1e3 * p.host,
        "exposed_comm_ms": 1e3 * p.exposed_comm,
        "per_family": {family: 1e3 * seconds for family, seconds in p.by_family.items()},
        "per_phase": {phase: 1e3 * seconds for phase, seconds in p.by_phase.items()},
        "per_source": {source: 1e3 * seconds for source, seconds in p.by_source.items()},
        "critical_path": {what: 1e3 * seconds for what, seconds in seconds_by_what(p.path).items()},
        "kernels": len(p.timeline.launches),
        "estimated_ops": list(p.estimated_ops),
        "estimated_ms": 1e3 * p.estimated_seconds,
        "out_of_domain_ops": list(p.out_of_domain_ops),
        "out_of_domain_ms": 1e3 * p.out_of_domain_seconds,
        "memory_gb": {"peak": p.memory.peak_bytes / 1e9, **{k: v / 1e9 for k, v in p.memory.by_kind.items()}},
        "host_profile": p.host_profile,
        "warnings": list(p.warnings),
        **ranks_json(p),
    }


def prediction_text(p: Prediction) -> str:
    """The answer as a page: the number, what it is made of, and where it came from."""
    ranks = [ranks_text(p), ""] if p.gpus > 1 else []
    return "\n".join([_headline(p), "", _split(p), "", *ranks, _families(p), "", _footer(p)])


def _headline(p: Prediction) -> str:
    device = p.platform.device
    clock = f", SM clock locked at {device.clock_mhz:g} MHz" if device.clock_mhz else ""
    sequence = f", {p.workload.seq_len} tokens" if p.workload.seq_len else ""
    low, high = (milliseconds(limit) for limit in p.interval)
    compiled = ", compiled" if "compiled" in p.workload.meta else ""
    several = f"{p.gpus} x " if p.gpus > 1 else ""
    each = " a GPU" if p.gpus > 1 else ""
    return (
        f"{p.workload.name} ({p.workload.mode}{compiled}) on {several}{device.name}{clock}\n"
        f"batch {p.workload.batch_size}{each}{sequence}: {milliseconds(p.iteration)} ms a step, "
        f"90 % interval {low} to {high} ms"
    )


def _split(p: Prediction) -> str:
    parts = [("device active", p.device_active), ("device idle", p.device_idle), ("host busy", p.host)]
    if p.gpus > 1:
        parts.insert(1, ("exposed communication", p.exposed_comm))
    rows = [
        (name, milliseconds(seconds), f"{seconds / p.iteration:6.1%}", bar(seconds / p.iteration))
        for name, seconds in parts
    ]
    path = ", ".join(f"{what} {seconds / p.iteration:.0%}" for what, seconds in _top(seconds_by_what(p.path), 4))
    return table(("", "ms", "of step", ""), rows, right=(1, 2)) + f"\ncritical path: {path}"


def _top(parts: dict[str, float], n: int) -> list[tuple[str, float]]:
    return list(parts.items())[:n]


def _families(p: Prediction) -> str:
    total = sum(p.by_family.values()) or 1.0
    rows = [
        (family, milliseconds(seconds), f"{seconds / total:6.1%}", bar(seconds / total))
        for family, seconds in p.by_family.items()
    ]
    return table(("kernels", "ms", "share", ""), rows, right=(1, 2))


def _footer(p: Prediction) -> str:
    sources = ", ".join(
        f"{name} {seconds / max(sum(p.by_source.values()), 1e-30):.0%}" for name, seconds in p.by_source.items()
    )
    lines = [
        f"{len(p.timeline.launches)} kernels; durations: {sources}; host profile: {p.host_profile}",
        _memory(p),
    ]
    if p.estimated_ops:
        lines.append(_marked("without a kernel model (costed from bytes)", p.estimated_ops, p.estimated_seconds, p))
    if p.out_of_domain_ops:
        lines.append(_marked("outside what was fitted", p.out_of_domain_ops, p.out_of_domain_seconds, p))
    return "\n".join([*lines, *(f"warning: {warning}" for warning in p.warnings)])


def _memory(p: Prediction) -> str:
    """The peak of the fullest rank, and what it is made of as far as two decimals show it."""
    shown = {
        kind: f"{nbytes / 1e9:.2f}" for kind, nbytes in sorted(p.memory.by_kind.items(), key=lambda each: -each[1])
    }
    parts = ", ".join(f"{kind.replace('_', ' ')} {size}" for kind, size in shown.items() if float(size))
    capacity = f"{p.platform.device.memory_bytes / 1e9:.0f} GB"
    return f"peak memory {p.memory.peak_bytes / 1e9:.2f} GB of {capacity}" + (f": {parts}" if parts else "")


def _marked(what: str, ops: tuple[str, ...], seconds: float, p: Prediction) -> str:
    """`12 % of kernel time outside what was fitted: aten::mm, aten::bmm and 7 more`."""
    share = seconds / max(sum(p.by_family.values()), 1e-30)
    more = f" and {len(ops) - _MOST_OPS} more" if len(ops) > _MOST_OPS else ""
    return f"{share:.0%} of kernel time {what}: {', '.join(ops[:_MOST_OPS])}{more}"

"""A prediction in a few sentences: how long, what bounds it, whether it fits, what it rests on, what to try."""

from __future__ import annotations

import math

from traincast.simulator.prediction.rank_results import sum_path_by_activity
from traincast.simulator.prediction.result import Prediction
from traincast.utils.display.text import format_duration, format_gigabytes, format_interval

_SURE = 0.9  # from here on whether it fits is stated without a word of doubt
_LEAST_BOUND = 0.1  # of the step: a second bound below it is not worth a word
_IDLE, _EXPOSED, _FUSABLE, _ARITHMETIC = 0.15, 0.12, 0.25, 0.4  # shares of the step from which a remedy is worth trying
_FUSED = ("elementwise", "norm", "softmax", "reduction", "copy", "other kernels")
_COMPUTE = ("gemm", "conv", "attention", "GEMMs")
_HOST = ("host", "waiting for the host")
_GROUPS = {"tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel", "pp": "stages",
           "dp": "data parallel"}  # fmt: skip


def state_verdict(p: Prediction) -> tuple[str, ...]:
    """Two or three sentences; parameters stand between backticks."""
    bounds = " and ".join(f"{name} ({share:.0%})" for name, share in rank_bounds(p))
    lines = [
        f"{format_duration(p.iteration)} per step (90 % interval {format_interval(p.interval)}), bound by {bounds}; "
        f"{state_memory(p)}.",
        p.trust.sentence,
    ]
    remedy = suggest_remedy(p)
    return (*lines, f"Worth trying: {remedy}.") if remedy else tuple(lines)


def split_critical_path(p: Prediction) -> dict[str, float]:
    """Seconds of the critical path by what it is spent on; under a layout, of the step by what it waits for."""
    if p.parallel is None:
        return sum_path_by_activity(p.path)
    return dict(split_step(p))


def rank_bounds(p: Prediction) -> list[tuple[str, float]]:
    """What takes most of the step and, where it matters, what comes second, with their shares."""
    whole = p.iteration or 1.0
    ranked = sorted(split_critical_path(p).items(), key=lambda item: -item[1])
    first = [(name, seconds / whole) for name, seconds in ranked[:2]]
    return [pair for number, pair in enumerate(first) if not number or pair[1] >= _LEAST_BOUND] or [("nothing", 0.0)]


def state_memory(p: Prediction) -> str:
    """Whether it fits: `fits, 27.1 of 80 GB`; how sure that is where it is not clear. A step that takes more than there
    is only while the allocator keeps spare blocks is shown with the least that it needs."""
    needed, limit, sure = p.needed_bytes + p.left_out_bytes, p.platform.device.memory_bytes, p.fit_probability
    if not math.isfinite(limit):
        return f"{needed / 1e9:.1f} GB of memory"
    if p.fits and needed > limit:
        needed = p.memory.required_bytes
    word = "fits" if p.fits else "does not fit"
    if 1 - _SURE < sure < _SURE:
        word = f"probably {word} ({max(sure, 1 - sure):.0%})"
    return f"{word}, {format_gigabytes(needed)} of {format_gigabytes(limit)} GB"


def suggest_remedy(p: Prediction) -> str:
    """The first thing worth trying, by what bounds the step; "" where nothing simple is."""
    used, device = p.scenario, p.platform.device
    if device.is_cpu or not used or p.workload.mode != "training":
        return ""
    if not p.fits:
        return "traincast fits, which tries what would make it fit"
    share = {name: seconds / (p.iteration or 1.0) for name, seconds in split_critical_path(p).items()}
    is_eager = used.get("kernels") == "eager"
    if is_eager and (sum(share.get(name, 0.0) for name in _HOST) > _IDLE or p.device_idle / p.iteration > _IDLE):
        return "`cuda_graph` or `compiled`, since the GPU waits for its host"
    if p.exposed_comm / (p.iteration or 1.0) > _EXPOSED:
        return f"a larger `batch_size`, since {p.exposed_comm / p.iteration:.0%} of the step is exposed communication"
    if used.get("dtype") == "fp32" and sum(share.get(name, 0.0) for name in _COMPUTE) > _ARITHMETIC:
        faster = next((dtype for dtype in ("bf16", "tf32", "fp16") if dtype in device.peak_flops), "")
        if faster:
            return f"`dtype={faster}`, since GEMMs run in fp32"
    fusable = sum(share.get(name, 0.0) for name in _FUSED)
    if is_eager and fusable > _FUSABLE:
        return f"`compiled`, since it fuses the small kernels that are {fusable:.0%} of the step"
    return ""


def split_step(result: Prediction) -> list[tuple[str, float]]:
    """The step of the rank that the others wait for by what it is spent on, in seconds; together they are the step."""
    figures = result.parallel
    assert figures is not None
    gemm, attention = (result.by_family.get(name, 0.0) for name in ("gemm", "attention"))
    update = result.by_phase.get("optimizer", 0.0)
    shown = figures.compute + sum(figures.exposed.values()) + figures.bubble
    rows = [("GEMMs", gemm), ("attention", attention)]
    rows.append(("other kernels", max(0.0, figures.compute - update - gemm - attention)))
    rows += [(f"exposed: {_GROUPS[name]}", seconds) for name, seconds in figures.exposed.items()]
    rows += [("pipeline bubble", figures.bubble), ("waiting for the host", max(0.0, result.iteration - shown))]
    return [row for row in (*rows, ("optimizer", update)) if row[1] > 0]

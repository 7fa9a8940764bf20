"""What a step of a Transformer over GPUs has besides what every step has: groups, bubble, memory, model FLOPs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from traincast.costs.kernels.collective import COLLECTIVE
from traincast.ir.ops import Phase
from traincast.ir.variants import UNIFORM
from traincast.simulator.parallelism.groups import NAMES
from traincast.simulator.prediction.prediction import SHARED_ERROR
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.timeline import Timeline, compute_union_seconds
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast.utils.metrics import Z90
from traincast.utils.totals import sum_by_key

STEP_SIGMA = 0.08
"""Log-sigma of steps beyond what their kernels and collectives err by: 92 % of the steps that constants are fitted on
are inside their intervals (docs/evidence/many-gpus.md)."""


def split_exposed_and_bubble(result: Prediction, *, stages: int) -> tuple[dict[str, float], float, float]:
    """Exposed communication by group, the pipeline's bubble, and the time in which other kernels run."""
    timeline = result.timeline
    group = _list_launch_communicators(timeline)
    end = timeline.times.kernel_end
    start = np.maximum(timeline.times.kernel_start, end - _list_transfer_seconds(result))
    chosen: BoolArray = group == 0
    reached = compute = _compute_union_seconds(start, end, chosen)
    exposed: dict[str, float] = {}
    for name in ("tp", "cp", "ep", "pp", "dp"):
        mine = np.isin(group, [number for number, called in NAMES.items() if called == name])
        if mine.any():
            chosen = chosen | mine
            now = _compute_union_seconds(start, end, chosen)
            exposed[name], reached = now - reached, now
    bubble = max(0.0, result.iteration - reached) if stages > 1 else 0.0
    return {name: seconds for name, seconds in exposed.items() if seconds > 0}, bubble, compute


def _compute_union_seconds(start: FloatArray, end: FloatArray, chosen: BoolArray) -> float:
    return float(compute_union_seconds(start[chosen][None], end[chosen][None])[0])


def _list_launch_communicators(timeline: Timeline) -> IntArray:
    """The communicator of every launch; 0 for one that communicates with nobody."""
    numbers = [signature.scalar("communicator", 0) for signature in timeline.program.signatures]
    of_signature = np.array([number if isinstance(number, int) else 0 for number in numbers], dtype=np.int64)
    op = timeline.schedule.op[timeline.launches]
    return np.asarray(of_signature[timeline.program.columns.op_signature[op]])


def _list_transfer_seconds(result: Prediction) -> FloatArray:
    """How long every launch takes once all ranks it needs are there; infinite where that is its whole time."""
    simulated, timeline = result.walk, result.timeline
    seconds = np.full(len(timeline.launches), np.inf)
    schedules = [simulated.instructions.schedules[program] for program in simulated.classes.program]
    group, row = next(simulated.place[c] for c, schedule in enumerate(schedules) if schedule is timeline.schedule)
    m = simulated.meetings
    mine = (m.group == group) & (m.row == row)
    at = np.searchsorted(timeline.launches, m.instruction[mine])
    seconds[at] = m.seconds[m.collective[mine]]
    return seconds


def compute_layout_interval(
    result: Prediction, exposed: dict[str, float]
) -> tuple[dict[str, float], tuple[float, float]]:
    """Log-sigmas of a step under a layout, and its 90 % interval in seconds: kernels err together in part, so do the
    collectives that show, and steps by more than either."""
    errors, seconds = result.kernel_errors, result.by_family
    kernels = sum(error for call, error in errors.items() if call.family is not COLLECTIVE)
    of_collectives = sum(
        error for call, error in errors.items() if call.family is COLLECTIVE and UNIFORM in call.variant.split()
    )
    shown = sum(exposed.values()) / max(seconds.get(COLLECTIVE.name, 0.0), 1e-30)
    errs = SHARED_ERROR * math.hypot(kernels, of_collectives * min(1.0, shown)) / result.iteration
    terms = {"kernels_and_communication": errs, "software_release": STEP_SIGMA}
    spread = math.exp(Z90 * math.hypot(*terms.values()))
    return terms, (result.iteration / spread, result.iteration * spread)


def remove_stage_waiting(result: Prediction) -> Prediction:
    """The prediction with messages between stages counted from when both stages are there: before, a stage waits in the
    pipeline's bubble."""
    timeline, program = result.timeline, result.timeline.program
    waiting = np.maximum(timeline.kernel_seconds - _list_transfer_seconds(result), 0.0)
    if not waiting.any():
        return result
    op = timeline.schedule.op[timeline.launches]
    phases = np.bincount(program.op_phase[op], weights=waiting, minlength=len(Phase))
    by_phase = {phase.name.lower(): float(phases[phase]) for phase in Phase}
    names = np.bincount(program.columns.op_signature[op], weights=waiting, minlength=len(program.symbolic))
    by_op = sum_by_key((program.symbolic[n].name, float(names[n])) for n in np.flatnonzero(names).tolist())
    in_phases = {f"({name})": seconds for name, seconds in by_phase.items()}
    return replace(
        result,
        by_family=_subtract_waiting(result.by_family, {COLLECTIVE.name: float(waiting.sum())}),
        by_phase=_subtract_waiting(result.by_phase, by_phase),
        by_source=_subtract_waiting(result.by_source, {"model": float(waiting.sum())}),
        extended={
            "by_module": _subtract_waiting(result.by_module, in_phases),
            "by_layer": _subtract_waiting(result.by_layer, in_phases),
            "by_op": _subtract_waiting(result.by_op, by_op),
        },
    )


def _subtract_waiting(seconds: dict[str, float], waiting: dict[str, float]) -> dict[str, float]:
    left = {name: value - waiting.get(name, 0.0) for name, value in seconds.items()}
    return {name: value for name, value in left.items() if value > 0}


def extend_periodically(longer: Prediction, shorter: Prediction, times: float) -> Prediction:
    """The step with more micro-batches: what `longer` has more than `shorter`, `times` times more."""

    def more(name: str) -> float:
        first, second = getattr(longer, name), getattr(shorter, name)
        return float(first + times * (first - second))

    def more_of(name: str) -> dict[str, float]:
        first, second = getattr(longer, name), getattr(shorter, name)
        return {key: value + times * (value - second.get(key, 0.0)) for key, value in first.items()}

    ratio = more("iteration") / longer.iteration
    low, high = longer.interval
    plain = ("iteration", "device_active", "device_idle", "host", "exposed_comm", "estimated_seconds")
    extended: dict[str, Any] = {name: more(name) for name in plain}
    extended |= {name: more_of(name) for name in ("by_family", "by_phase", "by_source")}
    return replace(
        longer,
        **extended,
        interval=(low * ratio, high * ratio),
        kernel_errors={call: ratio * seconds for call, seconds in longer.kernel_errors.items()},
        outside=tuple(replace(item, seconds=ratio * item.seconds) for item in longer.outside),
        extended={name: more_of(name) for name in ("by_module", "by_layer", "by_op")},
    )

"""A step of a Transformer under a layout, predicted on a platform, with groups, bubble, memory and model FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from traincast.costs.host.profile import HostProfile, load_usual_host
from traincast.costs.in_step import SHIPPED, InStep
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.hardware.platform import Platform
from traincast.ir.memory import Memory, MemoryEvents, compute_peak_memory
from traincast.ir.ops import UNIFORM, Phase
from traincast.ir.workload import Workload
from traincast.models.transformers.description import Transformer, count_model_flops
from traincast.simulator.memory.device_memory import (
    KNOWN_SPREAD,
    PYTORCH_SPREAD,
    Communicators,
    DeviceMemory,
    make_device_memory,
)
from traincast.simulator.parallelism.groups import NAMES
from traincast.simulator.parallelism.layout import PYTORCH, Layout, check_arithmetic_units, complete_layout
from traincast.simulator.parallelism.memory import list_stage_events
from traincast.simulator.parallelism.program import build_parallel_workload
from traincast.simulator.parallelism.stage_units import LayerCosts
from traincast.simulator.parallelism.step import Stage, StepModel
from traincast.simulator.prediction.prediction import SHARED_ERROR, predict_step
from traincast.simulator.prediction.rank_results import Note, RankResult
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.throughput import ParallelFigures
from traincast.simulator.timeline import Timeline, compute_union_seconds
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast.utils.metrics import Z90, sum_by_key

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
    simulated, timeline = result.simulation, result.timeline
    seconds = np.full(len(timeline.launches), np.inf)
    schedules = [simulated.instructions.schedules[program] for program in simulated.classes.program]
    group, row = next(simulated.place[c] for c, schedule in enumerate(schedules) if schedule is timeline.schedule)
    m = simulated.collectives
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

    def more_of(name: str) -> dict[Any, float]:
        first, second = getattr(longer, name), getattr(shorter, name)
        return {key: value + times * (value - second.get(key, 0.0)) for key, value in first.items()}

    def more_of_path(name: str) -> dict[Any, float]:
        grown = {key: max(seconds, 0.0) for key, seconds in more_of(name).items()}
        return dict(sorted(grown.items(), key=lambda item: -item[1]))

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
        ranks=_extend_ranks(longer.ranks, shorter.ranks, times, ratio),
        extended={
            **{name: more_of(name) for name in ("by_module", "by_layer", "by_op")},
            **{name: more_of_path(name) for name in ("path_by_activity", "path_by_place")},
        },
    )


def _extend_ranks(
    longer: tuple[RankResult, ...], shorter: tuple[RankResult, ...], times: float, ratio: float
) -> tuple[RankResult, ...]:
    """Times of ranks with more micro-batches; where other ranks do the same in the shorter step, all by one `ratio`."""
    before = {result.ranks: result for result in shorter}
    names = ("iteration", "device_active", "device_idle", "compute", "host", "exposed_comm", "waiting")

    def extend(result: RankResult, name: str) -> float:
        now: float = getattr(result, name)
        if result.ranks not in before:
            return ratio * now
        then: float = getattr(before[result.ranks], name)
        return max(0.0, now + times * (now - then))

    return tuple(replace(one, **dict[str, Any]((name, extend(one, name)) for name in names)) for one in longer)


def predict_parallel(
    model: Transformer,
    platform: Platform,
    layout: Layout,
    *,
    host: HostProfile | None = None,
    roofline_only: bool = False,
    prepare: Callable[[Workload], Workload] | None = None,
    late: float = 0.0,
    op_speed: Mapping[str, float] | None = None,
    check_memory: bool = True,
) -> Prediction:
    """Predicts one step by simulating a rank of every pipeline stage; a layout that cannot be is rejected. `prepare`
    edits the ops of all stages before; `late` and `op_speed` as in `predict_step`. Without `check_memory` the memory
    is that of what was simulated, which may be fewer micro-batches."""
    layout = complete_layout(layout, model)
    check_arithmetic_units(layout.precision, platform.device)
    profile = host or load_usual_host(platform.device)
    stages = _list_stages(model, platform, layout, profile, roofline_only=roofline_only)

    def simulate(micro_batches: int) -> Prediction:
        node = platform.topology.gpus_per_node if platform.topology is not None else 1
        workload = build_parallel_workload(model, layout, stages, gpus_per_node=node, micro_batches=micro_batches)
        edited = workload if prepare is None else prepare(workload)
        step = predict_step(
            edited, platform, host=profile, roofline_only=roofline_only, late=late, op_speed=op_speed,
            check_memory=False,
        )  # fmt: skip
        if edited is not workload:
            changes.append(_find_peak(edited) - _find_peak(workload))
        return _add_figures(step, model, platform, layout, micro_batches)

    changes: list[int] = []
    simulated, period = count_simulated_micro_batches(layout)
    result = simulate(simulated)
    if simulated < layout.accumulation:
        result = _extend_prediction(result, simulate(simulated - period), (layout.accumulation - simulated) / period)
    if not check_memory:
        return result
    return _add_memory(result, platform, model, layout, stages, changes[0] if changes else 0)


def _add_figures(
    step: Prediction, model: Transformer, platform: Platform, layout: Layout, micro_batches: int
) -> Prediction:
    """A simulated step of this many micro-batches with what is told of layouts besides."""
    result = remove_stage_waiting(step)
    exposed, bubble, compute = split_exposed_and_bubble(result, stages=layout.pp)
    terms, interval = compute_layout_interval(result, exposed)
    shown = sum(exposed.values())
    return replace(
        result,
        parallel=_make_figures(model, platform, layout, exposed, bubble, compute, micro_batches),
        interval=interval,
        interval_terms=terms,
        outside=tuple(item for item in result.outside if item.op not in ("c10d::recv_", "c10d::send")),
        exposed_comm=shown,
        device_active=compute + shown,
        device_idle=max(0.0, result.iteration - compute - shown),
    )


def _find_peak(workload: Workload) -> int:
    """Bytes that the fullest stage holds at once in what is simulated."""
    return max(compute_peak_memory(program).peak_bytes for program in workload.programs)


def count_simulated_micro_batches(layout: Layout) -> tuple[int, int]:
    """Micro-batches to simulate, and after how many of them the step repeats itself: a pipeline is in its steady state
    once it has filled; one stage alone at once."""
    period = layout.pp if layout.vp > 1 else 1
    filled = {"interleaved": 2 * layout.pp, "zero-bubble": 3 * layout.pp}  # weight gradients wait for later gaps
    fewest = 3 if layout.pp == 1 else filled.get(layout.schedule, layout.pp + 3)
    if layout.accumulation <= 2 * fewest - period:  # two short simulations would take as long
        return layout.accumulation, period
    return fewest + (layout.accumulation - fewest) % period, period


def estimate_seconds(
    model: Transformer,
    platform: Platform,
    layout: Layout,
    *,
    host: HostProfile | None = None,
    in_step: InStep = SHIPPED,
) -> float:
    """Seconds of a step in closed form: for searches over many layouts. `predict_parallel` simulates the same step."""
    layout = complete_layout(layout, model)
    check_arithmetic_units(layout.precision, platform.device)
    profile = host or load_usual_host(platform.device)
    return _make_step_model(model, platform, layout, profile, in_step=in_step).estimate_seconds()


def estimate_used_bytes(
    model: Transformer, platform: Platform, layout: Layout, *, host: HostProfile | None = None
) -> float:
    """Bytes that the fullest device must hold, without a replay: of the first stage, which keeps most micro-batches, or
    the last, which has the loss."""
    layout = complete_layout(layout, model)
    stages = _list_stages(model, platform, layout, host)
    events = _list_events(model, platform, layout, stages, only=(0, layout.pp - 1))
    fullest = max(events, key=lambda one: one.peak_bytes)
    return _make_memory(Memory(fullest), platform, layout).estimate_used_bytes()


def _extend_prediction(longer: Prediction, shorter: Prediction, times: float) -> Prediction:
    whole = extend_periodically(longer, shorter, times)
    first, second = longer.parallel, shorter.parallel
    assert first is not None and second is not None
    exposed = {
        name: max(0.0, seconds + times * (seconds - second.exposed.get(name, 0.0)))
        for name, seconds in first.exposed.items()
    }
    figures = replace(
        first,
        exposed=exposed,
        bubble=max(0.0, first.bubble + times * (first.bubble - second.bubble)),
        compute=first.compute + times * (first.compute - second.compute),
    )
    return replace(whole, parallel=figures)


def _make_figures(
    model: Transformer, platform: Platform, layout: Layout, exposed: dict[str, float], bubble: float,
    compute: float, micro_batches: int,
) -> ParallelFigures:  # fmt: skip
    device = platform.device
    return ParallelFigures(
        layout=layout,
        exposed=exposed,
        bubble=bubble,
        compute=compute,
        flops=_count_model_flops(model, layout),
        peak_flops=device.get_product_flops(layout.precision),
        simulated=micro_batches,
    )


def predict_layout_memory(model: Transformer, platform: Platform, layout: Layout) -> DeviceMemory:
    """Memory of the fullest rank alone: what `predict_parallel` says of it, without simulating the step."""
    layout = complete_layout(layout, model)
    stages = _list_stages(model, platform, layout)
    fullest = max(_list_events(model, platform, layout, stages), key=lambda events: events.peak_bytes)
    return _make_memory(Memory(fullest), platform, layout)


def _list_stages(
    model: Transformer,
    platform: Platform,
    layout: Layout,
    host: HostProfile | None = None,
    *,
    roofline_only: bool = False,
) -> list[Stage]:
    """What every stage costs, for schedules whose order depends on it."""
    if layout.schedule != "zero-bubble":
        return []
    profile = host or load_usual_host(platform.device)
    return _make_step_model(model, platform, layout, profile, roofline_only=roofline_only).list_stages()


def _list_events(
    model: Transformer,
    platform: Platform,
    layout: Layout,
    stages: Sequence[Stage],
    only: Collection[int] | None = None,
) -> list[MemoryEvents]:
    node = platform.topology.gpus_per_node if platform.topology is not None else 1
    micro_batches = min(layout.accumulation, count_simulated_micro_batches(layout)[0])
    return list_stage_events(model, layout, stages, gpus_per_node=node, micro_batches=micro_batches, only=only)


def _make_memory(memory: Memory, platform: Platform, layout: Layout) -> DeviceMemory:
    groups = Communicators(
        sum(degree > 1 for degree in (layout.tp, layout.cp, layout.dp)), (layout.pp > 1) + (layout.ep > 1)
    )
    spread = PYTORCH_SPREAD if layout.kernels in PYTORCH else KNOWN_SPREAD
    return make_device_memory(memory, platform.device, communicators=groups, spread=spread)


def _add_memory(
    result: Prediction, platform: Platform, model: Transformer, layout: Layout, stages: Sequence[Stage], change: int
) -> Prediction:
    """The prediction with the memory of the whole step, and what is to be known of it. `change` is how many bytes more
    edits of its ops take."""
    per_stage = layout.gpus // layout.pp
    by_stage = [Memory(events) for events in _list_events(model, platform, layout, stages)]
    if change:
        by_stage = [Memory(one.events.scale_activations(change)) for one in by_stage]
    ranks = tuple(replace(rank, memory=by_stage[rank.ranks[0] // per_stage]) for rank in result.ranks)
    memory = _make_memory(max(by_stage, key=lambda one: one.peak_bytes), platform, layout)
    device, warnings = platform.device, list[str]()
    if not memory.fits:
        warnings.append(memory.describe_excess("the fullest rank" if layout.gpus > 1 else "the step"))
    if layout.precision not in device.peak_flops:
        warnings.append(Note(f"{device.key} has no {layout.precision} units; GEMMs run at the rate of its others"))
    if platform.assumed and layout.gpus > 1:
        warnings.append(Note(platform.assumed))
    return replace(result, memory=memory, ranks=ranks, warnings=tuple(warnings))


def _count_model_flops(model: Transformer, layout: Layout) -> float:
    """Floating-point operations of a step as MFU counts them: a frozen weight has no gradient (four per weight and
    token instead of six), and below all that is trained there is no backward pass (two)."""
    whole = count_model_flops(model, layout.global_batch, layout.seq_len, document_len=layout.document_len)
    if layout.adapter_rank:
        return whole * 2 / 3
    return whole * (1 - 2 / 3 * layout.frozen_layers / model.layers)


class _Held:
    """A platform and a host profile as the key of what was priced for them: equal when they are the same."""

    def __init__(self, platform: Platform, host: HostProfile) -> None:
        self.platform, self.host = platform, host

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.platform == other.platform and self.host is other.host

    def __hash__(self) -> int:
        return hash(self.host.name)


@lru_cache(maxsize=128)
def _make_layer_costs(key: str, held: _Held, roofline_only: bool) -> LayerCosts:
    return LayerCosts(held.platform.device, held.host, roofline_only=roofline_only)


def _make_step_model(
    model: Transformer, platform: Platform, layout: Layout, host: HostProfile, *, roofline_only: bool = False,
    in_step: InStep = SHIPPED,
) -> StepModel:  # fmt: skip
    pieces = _make_layer_costs(platform.key, _Held(platform, host), roofline_only).with_numbers(in_step)
    return StepModel(model, platform, layout, pieces, in_step)

"""A step of a Transformer under a layout, predicted on a platform."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.costs.in_step import SHIPPED, InStep
from traincast.hardware.platform import Platform
from traincast.ir.memory import Memory, MemoryEvents, compute_peak_memory
from traincast.ir.workload import Workload
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.sizes import count_model_flops
from traincast.simulator.memory.device_memory import KNOWN_SPREAD, PYTORCH_SPREAD, DeviceMemory, make_device_memory
from traincast.simulator.parallelism.figures import (
    compute_layout_interval,
    extend_periodically,
    remove_stage_waiting,
    split_exposed_and_bubble,
)
from traincast.simulator.parallelism.layer_costs import LayerCosts
from traincast.simulator.parallelism.layout import PYTORCH, Layout, check_arithmetic_units, complete_layout
from traincast.simulator.parallelism.memory import list_stage_events
from traincast.simulator.parallelism.program import build_parallel_workload
from traincast.simulator.parallelism.step import Stage, StepModel
from traincast.simulator.prediction.parallel import ParallelFigures
from traincast.simulator.prediction.prediction import predict_step
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.warnings import Note


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
    profile = host or load_host_profile(platform.device.host, platform.device.host_slowness)
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
    fewest = 3 if layout.pp == 1 else 2 * layout.pp if layout.vp > 1 else layout.pp + 2
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
    profile = host or load_host_profile(platform.device.host, platform.device.host_slowness)
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
    profile = host or load_host_profile(platform.device.host, platform.device.host_slowness)
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
    groups = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp))
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

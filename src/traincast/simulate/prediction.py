"""The answer: how long a step takes on a platform, and what it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from traincast.errors import TraincastError
from traincast.host.profile import HostProfile, load_host_profile
from traincast.kernels.call import BoolArray, FloatArray
from traincast.kernels.cost import Costs, Source, price
from traincast.kernels.lowered import LoweredProgram, lower_program
from traincast.kernels.registry import LoweringContext
from traincast.platform.platform import Platform
from traincast.simulate.schedule import RUNTIME_CALLS, Code, Schedule, build_schedule
from traincast.simulate.timeline import Timeline, simulate_step
from traincast.workload.program import Memory, Program, peak_memory
from traincast.workload.workload import Workload

Z90 = 1.645  # standard normal quantile of a two-sided 90 % interval
_OUT_OF_DOMAIN_SIGMA = 0.25  # what leaving the fitted range adds to a call's spread, in quadrature


@dataclass(frozen=True, eq=False, kw_only=True)
class Prediction:
    """One step of a workload on a platform. Times are seconds; `interval` is a 90 % interval of `iteration`.

    `estimated_ops` are ops without a kernel model (costed from their bytes), `out_of_domain_ops` those with a
    call outside of what their model was fitted on, both with most device time first; `estimated_seconds` and
    `out_of_domain_seconds` are the device time of those calls.
    """

    workload: Workload
    platform: Platform
    host_profile: str
    iteration: float
    interval: tuple[float, float]
    device_active: float
    device_idle: float
    host: float
    exposed_comm: float
    by_family: dict[str, float]
    by_phase: dict[str, float]
    by_source: dict[str, float]
    estimated_ops: tuple[str, ...]
    estimated_seconds: float
    out_of_domain_ops: tuple[str, ...]
    out_of_domain_seconds: float
    memory: Memory
    warnings: tuple[str, ...]
    timeline: Timeline
    gpus: int = 1


@lru_cache(maxsize=64)
def _compiled(program: Program, context: LoweringContext) -> tuple[LoweredProgram, Schedule]:
    lowered = lower_program(program, context)
    return lowered, build_schedule(program, lowered)


@lru_cache(maxsize=64)
def _memory(program: Program) -> Memory:
    return peak_memory(program)


def lowering_context(workload: Workload, *, tf32: bool = False) -> LoweringContext:
    """The context in which this workload's ops become kernels."""
    major, _, minor = workload.framework_version.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise TraincastError(
            f"workload '{workload.name}' has no usable PyTorch version: {workload.framework_version!r}"
        )
    return LoweringContext(framework_version=(int(major), int(minor)), tf32=tf32)


def predict_step(
    workload: Workload,
    platform: Platform,
    *,
    tf32: bool = False,
    host: HostProfile | None = None,
    roofline_only: bool = False,
) -> Prediction:
    """Predicts one step of a single-rank workload on one device of the platform."""
    if len(workload.programs) != 1 or len(workload.ranks) != 1:
        raise TraincastError(
            f"workload '{workload.name}' has {len(workload.ranks)} ranks; one rank is predicted for now"
        )
    program = workload.programs[0]
    lowered, schedule = _compiled(program, lowering_context(workload, tf32=tf32))
    costs = price(lowered, platform.device, roofline_only=roofline_only)
    host = host or load_host_profile(platform.device.host)
    timeline = simulate_step(
        program,
        schedule,
        lowered.calls,
        host_seconds(schedule, program, host),
        costs.seconds,
        synchronised=workload.synchronised,
        gap=platform.device.kernel_gap,
    )
    memory = _memory(program)
    active = timeline.device_active()
    spread = _relative_spread(timeline, costs, host, active)
    launched = schedule.call[timeline.launches]
    per_source = np.bincount(costs.source[launched], weights=timeline.kernel_seconds, minlength=len(Source))
    estimated_ops, estimated_seconds = _marked_ops(timeline, lowered.estimated)
    outside_ops, outside_seconds = _marked_ops(timeline, ~costs.in_domain & ~lowered.estimated)
    return Prediction(
        workload=workload,
        platform=platform,
        host_profile=host.name,
        iteration=timeline.seconds,
        interval=(timeline.seconds * math.exp(-Z90 * spread), timeline.seconds * math.exp(Z90 * spread)),
        device_active=active,
        device_idle=max(timeline.seconds - active, 0.0),
        host=timeline.host_busy,
        exposed_comm=0.0,
        by_family=timeline.seconds_by_family(),
        by_phase=_by_phase(timeline),
        by_source={source.name.lower(): float(per_source[source]) for source in Source if per_source[source]},
        estimated_ops=estimated_ops,
        estimated_seconds=estimated_seconds,
        out_of_domain_ops=outside_ops,
        out_of_domain_seconds=outside_seconds,
        memory=memory,
        warnings=_warnings(memory, platform),
        timeline=timeline,
    )


def host_seconds(schedule: Schedule, program: Program, host: HostProfile) -> FloatArray:
    """Host time of every instruction under a host profile."""
    parts = host.scope_seconds(program.names)
    runtime = np.array([host.t4[name] for name in RUNTIME_CALLS])
    seconds: FloatArray = np.where(schedule.code == Code.HOST, parts[schedule.name, schedule.part], 0.0)
    calls = schedule.runtime >= 0
    seconds[calls] = runtime[schedule.runtime[calls]]
    return seconds


def _relative_spread(timeline: Timeline, costs: Costs, host: HostProfile, active: float) -> float:
    """Spread of log step time: kernels of one family err together, families and the host on their own."""
    if timeline.seconds <= 0:
        return 0.0
    sigma = np.hypot(costs.sigma, np.where(costs.in_domain, 0.0, _OUT_OF_DOMAIN_SIGMA))
    per_call = np.bincount(
        timeline.schedule.call[timeline.launches], weights=timeline.kernel_seconds, minlength=len(sigma)
    )
    by_family: dict[str, float] = {}
    for call, error in zip(timeline.calls, (sigma * per_call).tolist(), strict=True):
        by_family[call.family.name] = by_family.get(call.family.name, 0.0) + error
    idle = max(timeline.seconds - active, 0.0)
    return math.hypot(host.spread * idle, *by_family.values()) / timeline.seconds


def _by_phase(timeline: Timeline) -> dict[str, float]:
    from traincast.workload.ops import Phase

    phase = timeline.program.op_phase[timeline.schedule.op[timeline.launches]]
    totals = np.bincount(phase, weights=timeline.kernel_seconds, minlength=len(Phase))
    return {p.name.lower(): float(totals[p]) for p in Phase if totals[p]}


def _marked_ops(timeline: Timeline, marked: BoolArray) -> tuple[tuple[str, ...], float]:
    """Names of the ops whose launches use a marked call, most device time first, and the seconds of those calls."""
    launches = timeline.launches
    chosen = marked[timeline.schedule.call[launches]]
    program, seconds = timeline.program, timeline.kernel_seconds[chosen]
    signatures = program.columns.op_signature[timeline.schedule.op[launches][chosen]]
    by_signature = np.bincount(signatures, weights=seconds, minlength=len(program.symbolic))
    totals: dict[str, float] = {}
    for index in np.unique(signatures).tolist():
        name = program.symbolic[index].name
        totals[name] = totals.get(name, 0.0) + float(by_signature[index])
    return tuple(sorted(totals, key=lambda name: (-totals[name], name))), float(seconds.sum())


def _warnings(memory: Memory, platform: Platform) -> tuple[str, ...]:
    missing = memory.peak_bytes - platform.device.memory_bytes
    if missing <= 0:
        return ()
    return (
        f"the step needs {memory.peak_bytes / 1e9:.1f} GB but {platform.device.key} has "
        f"{platform.device.memory_bytes / 1e9:.0f} GB: {missing / 1e9:.1f} GB too much; it would not run as it is",
    )

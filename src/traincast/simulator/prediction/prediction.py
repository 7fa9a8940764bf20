"""Predicting one step of a workload on a platform, or steps of one GPU that differ in their sizes side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.costs.host.profile import HostProfile, load_usual_host
from traincast.costs.kernels.contract import Estimate, KernelCall
from traincast.costs.kernels.cost import Costs, price_in_step
from traincast.costs.kernels.families import is_chip_measured
from traincast.costs.kernels.registry import make_lowering_context
from traincast.costs.kernels.unmodelled import OPAQUE
from traincast.hardware.platform import Platform
from traincast.ir.memory import compute_peak_memory
from traincast.ir.workload import Workload
from traincast.simulator.instructions import StepInstructions, build_step_instructions
from traincast.simulator.memory.device_memory import DeviceMemory, make_device_memory
from traincast.simulator.memory.workspaces import add_op_workspaces
from traincast.simulator.prediction.breakdown import list_outside_ops
from traincast.simulator.prediction.rank_results import (
    describe_updates,
    find_slowest_class,
    list_rank_results,
    list_warnings,
    make_fullest_memory,
)
from traincast.simulator.prediction.result import Prediction, make_prediction
from traincast.simulator.prediction.step import StepSimulation, Unevenness, simulate_step
from traincast.simulator.timeline import Timeline
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import Z90

# Of a kernel family's spread, which is that of single kernels, the share that all kernels of a step have in common. Set
# so that 94 % of the 99 measured steps on one GPU are inside, see docs/evidence/dlrm.md
SHARED_ERROR = 0.6
"""See above: of the variance of a call's log time, the square of this is common to its family."""
RELEASE_SPREAD = 0.04
"""Log-sigma of the software: one configuration differs by 4 % between submitters, and by 6 % between releases."""
SETUP_SPREAD = 0.12
"""Log-sigma of a system of several GPUs: how it is wired, fed and tuned. MLPerf's 8 x A100 80 GB in one configuration
differ by 17 %, by 8 % without the three slowest."""

NEW_CHIP_SPREAD = 0.07
"""Log-sigma of kernels on a chip of which none was measured: they err together. Set on Lambda's boards and timm's
families that were not held back, see docs/evidence/one-gpu.md"""
FAR_SPREAD = 0.25
"""Log-sigma for each factor of e beyond the batch sizes that a capture is trusted at: parts of a step that stay (at
most 512 rows) or are cut in chunks are not seen. At 40 times the captured size it holds a factor of 2.6. Set on the
steps of that kind in tests/corpus/test_cases.py, no measurement."""
MACHINE_SPREAD = 0.1
"""Log-sigma of kernels on a graphics card in a machine that is not named, whose cooling decides its clock: four RTX
2080 Ti of torchvision's table differ by up to 13 %, its TITAN RTX from that of Lambda's by 25 %."""
WIRING_SPREAD = 0.5
"""Log-sigma of what is exposed of communication over PCIe: two servers of eight cards differ by a factor of 2."""


def predict_step(
    workload: Workload,
    platform: Platform,
    *,
    tf32: bool = False,
    host: HostProfile | None = None,
    roofline_only: bool = False,
    uneven: Unevenness | None = None,
    late: float = 0.0,
    op_speed: Mapping[str, float] | None = None,
    check_memory: bool = True,
) -> Prediction:
    """Predicts one step of a workload, each of its ranks on one device of the platform (rank r on GPU r); every step
    begins `late` seconds late. `op_speed` is how many times as fast the kernels of an op run, by its name. On a machine
    that was measured (`Machine`) each rank runs on one core. Without `check_memory` nobody is told that it does not
    fit: of parts of steps."""
    if platform.device.is_cpu:
        if tf32 or roofline_only or host is not None or uneven is not None:
            raise TraincastError(
                f"`tf32`, `host`, `roofline_only` and `uneven` are for GPUs; leave them out on '{platform.key}'"
            )
        from traincast.simulator.cpu.predict import predict_on_machine

        return predict_on_machine(workload, platform, late=late, op_speed=op_speed)
    instructions = _build_instructions(workload, platform, tf32=tf32, apart=uneven is not None)
    device = platform.get_device_when_sharing(len(workload.ranks))
    costs = price_in_step(instructions.lowered[0], device, roofline_only=roofline_only)
    costs = _add_collectives(costs, instructions, instructions.seconds(platform.topology))
    costs = _add_uniform_collectives(costs, *instructions.uniform_seconds(platform.topology))
    named, host = host is not None, host or load_usual_host(platform.device)
    simulated = simulate_step(
        instructions,
        costs,
        host,
        platform.topology,
        synchronised=workload.synchronised,
        gap=platform.device.kernel_gap,
        uneven=uneven,
        late=late,
        op_speed=op_speed,
    )
    return _summarise_step(
        workload, platform, host, simulated, costs, tf32=tf32, check_memory=check_memory, named=named
    )


def _build_instructions(workload: Workload, platform: Platform, *, tf32: bool, apart: bool) -> StepInstructions:
    """The step as instructions; `apart` gives every rank a program of its own, since no two are alike."""
    context = make_lowering_context(workload, platform.device, tf32=tf32)
    if platform.topology is not None and len(workload.ranks) > 1:
        context = replace(context, gpus_per_node=platform.topology.gpus_per_node)
    if not apart:
        return build_step_instructions(workload.programs, workload.ranks, context)
    programs = tuple(workload.programs[p] for p in workload.ranks)
    return build_step_instructions(programs, tuple(range(len(programs))), context)


def _summarise_step(
    workload: Workload, platform: Platform, host: HostProfile, simulated: StepSimulation, costs: Costs, *, tf32: bool,
    check_memory: bool, named: bool,
) -> Prediction:  # fmt: skip
    """What the simulation says, with its errors and warnings."""
    instructions = simulated.instructions
    results = list_rank_results(simulated)
    slowest = find_slowest_class(simulated, results)
    timeline = simulated.timeline(slowest)
    programs = instructions.programs
    memory = make_fullest_memory(results, platform.device, programs, workload.framework_version, simulated)
    errors = compute_kernel_errors(timeline, costs)
    terms = compute_spread_terms(
        timeline, errors, host, platform, results[slowest].device_active, several=len(workload.ranks) > 1,
        exposed=results[slowest].exposed_comm, named=named,
    )  # fmt: skip
    if distance := workload.measure_distance(workload.batch_size):
        terms["far_from_captured_size"] = FAR_SPREAD * math.log(distance)
    estimated = instructions.lowered[simulated.classes.program[slowest]].estimated
    warnings = list_warnings(memory, results, instructions, tf32=tf32, check_memory=check_memory)
    return make_prediction(
        workload, platform, simulated, costs, ranks=results, slowest=slowest, timeline=timeline, estimated=estimated,
        host_profile=host.name, host_spread=host.spread, terms=terms, errors=errors, memory=memory,
        outside=list_outside_ops(timeline, costs, ~costs.in_domain & ~estimated, SHARED_ERROR * costs.spread()),
        warnings=(*warnings, *describe_updates(workload.updates, simulated.seconds)),
    )  # fmt: skip


def _add_collectives(costs: Costs, instructions: StepInstructions, exchanged: Estimate) -> Costs:
    """Gives the collective calls the spread and domain of the collectives they are part of (the widest of several)."""
    collective, call = instructions.collective_call.T
    np.maximum.at(costs.sigma, call, exchanged.sigma[collective])
    np.logical_and.at(costs.in_domain, call, exchanged.in_domain[collective])
    return costs


def _add_uniform_collectives(costs: Costs, rows: IntArray, estimate: Estimate) -> Costs:
    """Gives the collectives among ranks of one program their time, spread and domain."""
    costs.seconds[rows], costs.sigma[rows], costs.in_domain[rows] = estimate.seconds, estimate.sigma, estimate.in_domain
    return costs


def compute_kernel_errors(timeline: Timeline, costs: Costs) -> dict[KernelCall, float]:
    """Seconds that one log-sigma of each call of the step is worth."""
    sigma = costs.spread()
    per_call = np.bincount(
        timeline.schedule.call[timeline.launches], weights=timeline.kernel_seconds, minlength=len(sigma)
    )
    rows = zip(timeline.calls, (sigma * per_call).tolist(), strict=True)
    return {call: seconds for call, seconds in rows if seconds}


def compute_spread_terms(
    timeline: Timeline, errors: dict[KernelCall, float], host: HostProfile, platform: Platform, active: float, *,
    several: bool, exposed: float = 0.0, named: bool = True,
) -> dict[str, float]:  # fmt: skip
    """Log-sigmas whose squares add up to that of the step: kernels of one family err together in part, families and the
    host on their own; the software's release, on several GPUs how the system is set up, ops whose arithmetic only
    their authors know, a chip that nobody measured, a graphics card in a machine that is not `named`, and PCIe between
    GPUs (`exposed` seconds of it), come on top."""
    if timeline.seconds <= 0:
        return {}
    by_family: dict[str, float] = {}
    for call, error in errors.items():
        by_family[call.family.name] = by_family.get(call.family.name, 0.0) + error
    unknown = by_family.pop(OPAQUE.name, 0.0)
    kernels = SHARED_ERROR * math.hypot(*by_family.values()) if by_family else 0.0
    of_step = math.hypot(_estimate_host_error(timeline, host.spread, active), kernels) / timeline.seconds
    terms = {"kernels_and_host": of_step, "software_release": RELEASE_SPREAD}
    if unknown:
        terms["unknown_arithmetic"] = unknown / timeline.seconds
    if not is_chip_measured(platform.device):
        terms["new_chip"] = NEW_CHIP_SPREAD * active / timeline.seconds
    if platform.device.is_graphics_card and not named:
        terms["machine"] = MACHINE_SPREAD * active / timeline.seconds
    topology = platform.topology
    if exposed and topology is not None and topology.island == 1 and not topology.curves:
        terms["wiring"] = WIRING_SPREAD * exposed / timeline.seconds
    return {**terms, "system_setup": SETUP_SPREAD} if several else terms


def _estimate_host_error(timeline: Timeline, spread: float, active: float) -> float:
    """Seconds that one log-sigma of the host is worth: what the device idles grows, or the host's own work, nearly as
    long as the step, becomes longer than it."""
    idle, ahead = max(timeline.seconds - active, 0.0), max(timeline.seconds / max(timeline.host_busy, 1e-12), 1.0)
    return max(spread * idle, (spread - math.log(ahead)) * timeline.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """The figures of one step; seconds and bytes. `interval` is a 90 % interval of `iteration`."""

    iteration: float
    interval: tuple[float, float]
    device_active: float
    memory: DeviceMemory


def predict_sizes(
    steps: Sequence[Workload],
    platform: Platform,
    *,
    tf32: bool = False,
    host: HostProfile | None = None,
    roofline_only: bool = False,
    late: float = 0.0,
    op_speed: Mapping[str, float] | None = None,
) -> list[SizeResult]:
    """What `predict_step` says of each of these steps, all of one GPU and of one model."""
    first = steps[0]
    for step in steps:
        if len(step.ranks) != 1:
            raise TraincastError(f"workload '{step.name}' runs on {len(step.ranks)} GPUs; predict it by itself")
    assert all(step.synchronised == first.synchronised and step.tf32 == first.tf32 for step in steps)
    programs = tuple(step.programs[step.ranks[0]] for step in steps)
    context = make_lowering_context(first, platform.device, tf32=tf32)
    # no step exchanges anything, so that each is a rank of its own, which nobody waits for
    instructions = build_step_instructions(programs, tuple(range(len(programs))), context)
    costs = price_in_step(instructions.lowered[0], platform.device, roofline_only=roofline_only)
    profile = host or load_usual_host(platform.device)
    simulated = simulate_step(
        instructions, costs, profile, None, synchronised=first.synchronised, gap=platform.device.kernel_gap,
        late=late, op_speed=op_speed,
    )  # fmt: skip
    of_rank: dict[int, SizeResult] = {}
    for c, result in enumerate(list_rank_results(simulated)):
        timeline = simulated.timeline(c)
        terms = compute_spread_terms(
            timeline,
            compute_kernel_errors(timeline, costs),
            profile,
            platform,
            result.device_active,
            several=False,
            named=host is not None,
        )
        spread = math.exp(Z90 * math.hypot(*terms.values())) if terms else 1.0
        for rank in result.ranks:
            of_rank[rank] = SizeResult(
                iteration=result.iteration,
                interval=(result.iteration / spread, result.iteration * spread),
                device_active=result.device_active,
                memory=make_device_memory(
                    add_op_workspaces(
                        compute_peak_memory(programs[rank]), programs[rank], instructions.lowered[rank], platform.device
                    ),
                    platform.device, framework=first.framework_version,
                ),
            )  # fmt: skip
    return [of_rank[rank] for rank in range(len(steps))]

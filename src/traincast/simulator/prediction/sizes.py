"""Steps of one GPU that differ in their sizes, predicted side by side: lowered and priced together, simulated as
rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.costs.kernels.cost import price_in_step
from traincast.costs.kernels.registry import make_lowering_context
from traincast.hardware.platform import Platform
from traincast.ir.memory import compute_peak_memory
from traincast.ir.workload import Workload
from traincast.simulator.instructions import build_step_instructions
from traincast.simulator.memory.device_memory import DeviceMemory, make_device_memory
from traincast.simulator.prediction.prediction import compute_kernel_errors, compute_spread_terms
from traincast.simulator.prediction.rank_results import list_rank_results
from traincast.simulator.prediction.step import simulate_step
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import Z90


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
    profile = host or load_host_profile(platform.device.host, platform.device.host_slowness)
    simulated = simulate_step(
        instructions, costs, profile, None, synchronised=first.synchronised, gap=platform.device.kernel_gap,
        late=late, op_speed=op_speed,
    )  # fmt: skip
    of_rank: dict[int, SizeResult] = {}
    for c, result in enumerate(list_rank_results(simulated)):
        timeline = simulated.timeline(c)
        terms = compute_spread_terms(
            timeline, compute_kernel_errors(timeline, costs), profile, platform, result.device_active, several=False
        )
        spread = math.exp(Z90 * math.hypot(*terms.values())) if terms else 1.0
        for rank in result.ranks:
            of_rank[rank] = SizeResult(
                iteration=result.iteration,
                interval=(result.iteration / spread, result.iteration * spread),
                device_active=result.device_active,
                memory=make_device_memory(compute_peak_memory(programs[rank]), platform.device, communicators=0),
            )
    return [of_rank[rank] for rank in range(len(steps))]

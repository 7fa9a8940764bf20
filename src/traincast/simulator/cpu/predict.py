"""A step on a machine that was measured: the same prediction as of any platform, priced by the machine's profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from traincast.costs.cpu.collectives import CpuCollective
from traincast.costs.cpu.op_costs import collect_op_deviations
from traincast.costs.cpu.profile import Machine, Profile
from traincast.costs.kernels.contract import KernelCall
from traincast.hardware.platform import Platform
from traincast.ir.workload import Workload
from traincast.simulator.collective_calls import MatchedCollective
from traincast.simulator.cpu.instructions import CpuStep, compute_step_seconds, lower_step
from traincast.simulator.prediction.rank_results import (
    RankResult,
    find_slowest_class,
    list_rank_results,
    make_fullest_memory,
)
from traincast.simulator.prediction.result import Prediction, make_prediction
from traincast.simulator.prediction.step import StepSimulation, list_kernel_seconds, simulate_durations
from traincast.simulator.timeline import Timeline
from traincast.utils.metrics import sum_by_key


def predict_on_machine(
    workload: Workload,
    platform: Platform,
    access: Sequence[Sequence[str]] = (),
    *,
    late: float = 0.0,
    op_speed: Mapping[str, float] | None = None,
) -> Prediction:
    """Predicts one step of a workload on a `Machine`, each of its ranks on one core. `access[r]` says of every table of
    rank r which rows its lookups touch; `late` and `op_speed` as in `predict_step`."""
    assert isinstance(platform, Machine)
    profile = platform.profile
    step = lower_step(workload, profile, access)
    met = [_list_collectives(collective, step.instructions.ranks) for collective in step.instructions.collectives]
    waiting = _estimate_waiting_seconds(step, profile) / max(len(met), 1)
    seconds = np.array([profile.exchanges.in_step(exchanges) for exchanges in met])
    sigma = np.array([profile.exchanges.sigma(exchanges) for exchanges in met])
    step.pay_collectives(seconds + waiting, sigma)
    durations = (
        [one.host_seconds for one in step.programs],
        list_kernel_seconds(step.instructions, step.costs, op_speed),
    )
    simulated = simulate_durations(step.instructions, durations, np.zeros(len(met)), synchronised=True, late=late)
    # collectives of one kind err alike, kinds apart
    errors = sum_by_key((one[0].kind, error) for one, error in zip(met, (sigma * seconds).tolist(), strict=True))
    deviations = {**_compute_op_deviations(step, profile), "collectives": math.hypot(*errors.values())}
    terms = {name: deviation / max(simulated.seconds, 1e-12) for name, deviation in deviations.items() if deviation}
    if len(workload.ranks) > 1 and profile.jitter:
        terms["step_to_step"] = profile.jitter
    results = _list_rank_results(step, simulated)
    slowest = find_slowest_class(simulated, results)
    timeline = simulated.timeline(slowest)
    return make_prediction(
        workload, platform, simulated, step.costs, ranks=results, slowest=slowest, timeline=timeline,
        estimated=step.instructions.lowered[0].estimated, host_profile=platform.key, host_spread=profile.host_spread,
        terms=terms, errors=_compute_kernel_errors(timeline, step), outside=(),
        memory=make_fullest_memory(results, platform.device, (), workload.framework_version),
        warnings=_list_warnings(results, platform),
    )  # fmt: skip


def _list_collectives(collective: MatchedCollective, ranks: Sequence[int]) -> list[CpuCollective]:
    """What every rank of a collective calls."""
    of = {part.program: exchange for part, exchange in zip(collective.participants, collective.exchanges, strict=True)}
    called = [of[ranks[rank]] for rank in collective.group]
    return [CpuCollective(one.kind, one.bytes, () if one.send is None else tuple(one.send.tolist())) for one in called]


def _estimate_waiting_seconds(step: CpuStep, profile: Profile) -> float:
    """What ranks wait for each other because each takes now longer, now shorter, from step to step: seconds of a step
    on average."""
    plans = [step.programs[number].plan for number in step.instructions.ranks]
    if len(plans) < 2 or not profile.jitter or not step.instructions.collectives:
        return 0.0
    steady, varying = (
        compute_step_seconds(plans, profile.exchanges.in_step, jitter) for jitter in (0.0, profile.jitter)
    )
    return varying - steady


def _compute_op_deviations(step: CpuStep, profile: Profile) -> dict[str, float]:
    """Of the rank whose ops may deviate most, in seconds."""
    ranks = [collect_op_deviations(one.priced, float(one.host.sum()), profile) for one in step.programs]
    return max(ranks, key=lambda deviations: math.hypot(*deviations.values()))


def _list_rank_results(step: CpuStep, simulated: StepSimulation) -> tuple[RankResult, ...]:
    """Ranks with the core's time for collectives counted as communication, of which nothing is ever hidden."""
    results = []
    for result, program in zip(list_rank_results(simulated), simulated.classes.program, strict=True):
        paid = float(step.costs.seconds[step.programs[program].paid].sum())
        exposed = result.exposed_comm + paid
        results.append(replace(result, compute=result.compute - paid, exposed_comm=exposed))
    return tuple(results)


def _compute_kernel_errors(timeline: Timeline, step: CpuStep) -> dict[KernelCall, float]:
    """Seconds that one log-sigma of each call is worth; calls that only differ in where their operands are together."""
    calls = timeline.schedule.call[timeline.launches]
    errors = sum_by_key(
        (timeline.calls[call], error)
        for call, error in zip(calls.tolist(), (step.costs.sigma * step.costs.seconds)[calls].tolist(), strict=True)
    )
    return {call: error for call, error in errors.items() if error}


def _list_warnings(results: Sequence[RankResult], platform: Platform) -> tuple[str, ...]:
    """That the ranks, which share one memory, do not fit into it."""
    needed = sum(len(result.ranks) * result.memory.peak_bytes for result in results)
    limit = platform.device.memory_bytes
    if needed <= limit:
        return ()
    notes = f"the step needs {needed / 1e9:.1f} GB but {platform.device.name} has {limit / 1e9:.0f} GB"
    return (f"{notes}; it would not run as it is",)

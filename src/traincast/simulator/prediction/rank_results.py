"""What a step is made of, rank by rank, and its critical path over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from traincast.hardware.device import Device
from traincast.ir.memory import Memory, compute_peak_memory
from traincast.ir.program import Program
from traincast.simulator.critical import PathPart, find_critical_path
from traincast.simulator.instructions import StepInstructions
from traincast.simulator.memory.device_memory import DeviceMemory, make_device_memory
from traincast.simulator.prediction.step import StepSimulation
from traincast.simulator.rank_group import GroupSimulation
from traincast.simulator.timeline import compute_union_seconds
from traincast.utils.arrays import FloatArray
from traincast.utils.totals import sum_by_key

_TOGETHER = 1e-3  # ranks that are done within this share of a step are done together


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One step of the ranks that do the same. Times are seconds.

    `exposed_comm` is the time in which the device only exchanges data or waits for others to; `waiting` the part of
    its collectives in which a rank was there and others were not; `compute` the time in which other kernels run.
    `memory` is the peak on its device.
    """

    ranks: tuple[int, ...]
    iteration: float
    device_active: float
    device_idle: float
    compute: float
    host: float
    exposed_comm: float
    waiting: float
    memory: Memory


@lru_cache(maxsize=8)  # each holds a whole step
def _compute_peak_memory(instructions: StepInstructions) -> list[Memory]:
    """Peak memory of every program."""
    return [compute_peak_memory(program) for program in instructions.programs]


def list_rank_memory(simulated: StepSimulation) -> list[Memory]:
    """Peak memory of every rank."""
    held = _compute_peak_memory(simulated.instructions)
    return [held[program] for program in simulated.instructions.ranks]


def list_rank_results(simulated: StepSimulation) -> tuple[RankResult, ...]:
    """One result a class of ranks."""
    tables = [_Totals(simulated, group, simulation) for group, simulation in enumerate(simulated.walks)]
    held = _compute_peak_memory(simulated.instructions)
    fullest = [held[program] for program in simulated.classes.program]
    for c, memory in zip(simulated.classes.of, held, strict=True):
        # ranks that take the same time need not hold the same
        fullest[c] = max(fullest[c], memory, key=lambda one: one.peak_bytes)
    return tuple(
        tables[group].answer(row, ranks, memory)
        for (group, row), ranks, memory in zip(simulated.place, simulated.ranks, fullest, strict=True)
    )


def make_fullest_memory(results: Sequence[RankResult], device: Device, programs: Sequence[Program]) -> DeviceMemory:
    """The memory of the rank that holds most, on its device; in host memory that of the one with most there."""
    fullest = max((result.memory for result in results), key=lambda memory: memory.peak_bytes)
    host = max((result.memory.events for result in results), key=lambda events: events.host_bytes).host
    if host is not fullest.events.host:
        fullest = Memory(replace(fullest.events, host=host))
    return make_device_memory(fullest, device, communicators=count_communicators(programs))


def count_communicators(programs: Sequence[Program]) -> int:
    """Groups of ranks in which programs communicate."""
    signatures = (signature for program in programs for signature in program.symbolic)
    return len({str(one.scalar("group", None)) for one in signatures if one.name.startswith("c10d::")})


class _Totals:
    """Totals of all ranks of a rank group."""

    def __init__(self, simulated: StepSimulation, number: int, simulation: GroupSimulation) -> None:
        # ranks that run ahead of others in one step and behind in the next have the period of all
        self.seconds = np.minimum(simulation.latest() - simulated.previous[number], simulated.seconds)
        self.host = simulation.group.host_seconds.sum(axis=1)
        exchanges = np.zeros(len(simulation.blocks.launch_order), dtype=np.bool_)
        exchanges[[simulation.blocks.blocks[block].first for block in simulation.blocks.meetings.values()]] = True
        met = exchanges.copy()
        exchanges[simulation.group.find_launches(simulation.blocks, simulation.group.transfers)] = True
        self.active = np.minimum(compute_union_seconds(simulation.starts.T, simulation.ends.T), self.seconds)
        self.compute = self.active
        self.waiting: FloatArray = np.zeros(simulation.group.size)
        if exchanges.any():
            computing = compute_union_seconds(simulation.starts[~exchanges].T, simulation.ends[~exchanges].T)
            self.compute = np.minimum(computing, self.active)
            m = simulated.meetings
            mine = m.group == number
            exchanging = np.bincount(
                m.row[mine], weights=m.seconds[m.collective[mine]], minlength=simulation.group.size
            )
            self.waiting = (simulation.ends - simulation.starts)[met].sum(axis=0) - exchanging

    def answer(self, row: int, ranks: tuple[int, ...], memory: Memory) -> RankResult:
        """One rank's, which stands for `ranks`."""
        seconds, active, compute = (float(column[row]) for column in (self.seconds, self.active, self.compute))
        return RankResult(
            ranks=ranks, iteration=seconds, device_active=active, device_idle=max(seconds - active, 0.0),
            compute=compute, host=float(self.host[row]), exposed_comm=active - compute,
            waiting=max(float(self.waiting[row]), 0.0), memory=memory,
        )  # fmt: skip


def compute_imbalance(results: Sequence[RankResult]) -> float:
    """How much longer the busiest rank computes than the mean, as a share of the mean."""
    compute = np.array([result.compute for result in results])
    mean = float(np.average(compute, weights=[len(result.ranks) for result in results]))
    return float(compute.max()) / mean - 1.0 if mean > 0 else 0.0


def find_slowest_class(simulated: StepSimulation, results: tuple[RankResult, ...]) -> int:
    """The class of ranks that the others wait for: of those done last, the one that waited least. Of the stages of a
    pipeline, which are done one after the other, the one that computes longest."""
    if any(exchange.replicated for calls in simulated.instructions.calls for exchange in calls.exchange[:1]):
        return max(range(len(results)), key=lambda c: results[c].compute)
    latest = simulated.class_latest()
    last = np.flatnonzero(latest >= latest.max() - _TOGETHER * simulated.seconds)
    return int(min(last.tolist(), key=lambda c: results[c].waiting))


HOST = "host"


def find_step_path(simulated: StepSimulation) -> list[PathPart]:
    """The critical path over all ranks, from the end of the step before to that of this one."""
    begin = max(float(previous.max()) for previous in simulated.previous)
    class_at = {place: c for c, place in enumerate(simulated.place)}
    parts = []
    for segment in find_critical_path(simulated.walks, simulated.meetings):
        if segment.end <= begin:  # the host may have begun this step before the last one was done
            continue
        c = class_at[segment.group, segment.row]
        what, op, name = _label_path_part(simulated, simulated.classes.program[c], segment.where, segment.instruction)
        parts.append(PathPart(simulated.ranks[c][0], what, op, name, max(segment.start, begin), segment.end))
    return parts


def _label_path_part(simulated: StepSimulation, p: int, where: str, instruction: int) -> tuple[str, str, str]:
    program, schedule = simulated.instructions.programs[p], simulated.instructions.schedules[p]
    if where == "device":
        call = simulated.instructions.lowered[p].calls[schedule.call[instruction]]
        op = program.symbolic[program.columns.op_signature[schedule.op[instruction]]].name
        return call.family.name, op, f"{call.family.name}: {call.kind}"
    scope = program.names[program.columns.scope_name[schedule.scope[instruction]]]
    return HOST, scope, f"{HOST}: {scope}"


def sum_path_by_activity(path: Iterable[PathPart]) -> dict[str, float]:
    """Seconds of the path by what it is spent on, longest first."""
    return sum_by_key((part.what, part.seconds) for part in path)


def sum_path_by_place(path: Iterable[PathPart]) -> dict[tuple[int, str], float]:
    """Seconds of the path by rank and op, longest first: the first one holds the step back most."""
    return sum_by_key(((part.rank, part.op), part.seconds) for part in path)

"""One step of a workload: its ranks classed by what they do, and the simulation over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from traincast.costs.host.profile import ALONE, BEFORE, HostProfile
from traincast.costs.kernels.cost import Costs
from traincast.ir.compiled import find_graph_scopes
from traincast.ir.program import Program
from traincast.simulator.instructions import Classes, StepInstructions, find_classes
from traincast.simulator.many_ranks import (
    Clocks,
    CollectiveIndex,
    Collectives,
    Deadlock,
    GroupSimulation,
    RankGroup,
    simulate_ranks,
)
from traincast.simulator.overlap import simulate_with_overlap
from traincast.simulator.schedule import RUNTIME_CALLS, Code, Schedule
from traincast.simulator.timeline import Timeline
from traincast.utils.arrays import FloatArray, IntArray
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.hardware.topology import Topology


_MOST_UNEVEN = 8_000_000  # instructions of all ranks; each takes 90 bytes
GRAPH_LAUNCH_SECONDS = 20e-6
"""Host time of launching a CUDA graph: the median of the 58 launches of up to three kernels in a traced A100 job."""


@dataclass(frozen=True, eq=False, slots=True)
class StepSimulation:
    """What the simulation made of a step: one row a class of ranks; `place[c]` is the rank group and row of class c.

    `ranks[c]` are the ranks of a class. `origin` is when the host of each rank of each rank group began the step,
    `previous` when its last step was done; seconds.
    """

    instructions: StepInstructions
    classes: Classes
    ranks: tuple[tuple[int, ...], ...]
    place: tuple[tuple[int, int], ...]
    simulations: tuple[GroupSimulation, ...]
    origin: tuple[FloatArray, ...]
    previous: tuple[FloatArray, ...]
    collectives: Collectives
    gap: float

    @property
    def seconds(self) -> float:
        """Time from one step to the next, over all ranks."""
        latest = max(float(simulation.latest().max()) for simulation in self.simulations)
        return latest - max(float(previous.max()) for previous in self.previous)

    def class_latest(self) -> FloatArray:
        """When each class of ranks is done."""
        latest = [simulation.latest() for simulation in self.simulations]
        return np.array([latest[group][row] for group, row in self.place])

    def timeline(self, c: int) -> Timeline:
        """The step of one class of ranks."""
        group, row = self.place[c]
        simulation, program = self.simulations[group], self.classes.program[c]
        return Timeline(
            program=self.instructions.programs[program],
            schedule=self.instructions.schedules[program],
            calls=self.instructions.lowered[program].calls,
            times=simulation.times(row),
            origin=float(self.origin[group][row]),
            seconds=float(simulation.latest()[row] - self.previous[group][row]),
            host_busy=float(simulation.group.host_seconds[row].sum()),
            gap=self.gap,
        )


def simulate_step(
    instructions: StepInstructions,
    costs: Costs,
    host: HostProfile,
    topology: Topology | None,
    *,
    synchronised: bool,
    gap: float,
    uneven: Unevenness | None = None,
    late: float = 0.0,
    op_speed: Mapping[str, float] | None = None,
) -> StepSimulation:
    """Simulates the step once from idle, or twice when steps run into each other, and keeps the last. The host of every
    rank begins it `late` seconds late; `op_speed` as in `predict_step`."""
    durations = _compute_durations(instructions, costs, host, uneven, op_speed or {})
    seconds = instructions.seconds(topology).seconds
    return simulate_durations(instructions, durations, seconds, synchronised=synchronised, gap=gap, late=late)


def simulate_durations(
    instructions: StepInstructions,
    durations: tuple[list[FloatArray], list[FloatArray]],
    collective_seconds: FloatArray,
    *,
    synchronised: bool,
    gap: float = 0.0,
    late: float = 0.0,
) -> StepSimulation:
    """As `simulate_step`, with host and kernel seconds of every program's instructions, and seconds of every
    collective."""
    durations = _delay_start(durations, late)
    classes, groups, place = _classify_programs(instructions, durations, collective_seconds)
    collectives = _make_collectives(classes, place)
    try:
        index = CollectiveIndex(groups, collectives)
        start = _start_clocks(groups, collectives, index, synchronised=synchronised, gap=gap)
        simulations = simulate_with_overlap(groups, collectives, index, start.clocks, gap=gap)
    except Deadlock as stuck:
        raise _explain_deadlock(stuck, instructions, classes, collectives, place) from None
    ranks: list[list[tuple[int, ...]]] = [[] for _ in classes.program]
    for program, c in enumerate(classes.of):
        ranks[c].append(instructions.ranks_of[program])
    return StepSimulation(
        instructions=instructions,
        classes=classes,
        ranks=tuple(members[0] if len(members) == 1 else tuple(sorted(chain(*members))) for members in ranks),
        place=place,
        simulations=tuple(simulations),
        origin=tuple(start.origin),
        previous=tuple(start.previous),
        collectives=collectives,
        gap=gap,
    )


def list_host_seconds(schedule: Schedule, program: Program, host: HostProfile) -> FloatArray:
    """Host time of every instruction under a host profile."""
    parts = host.scope_seconds(program.names)
    runtime = np.array([host.t4[name] for name in RUNTIME_CALLS])
    seconds: FloatArray = np.where(schedule.code == Code.HOST, parts[schedule.name, schedule.part], 0.0)
    begins = np.flatnonzero((schedule.code == Code.HOST) & np.isin(schedule.part, (BEFORE, ALONE)))
    gaps = np.stack([host.gap_seconds(program.names, main=main) for main in (True, False)])
    seconds[begins] += gaps[np.minimum(schedule.thread[begins], 1), schedule.name[begins]]
    calls = schedule.runtime >= 0
    seconds[calls] = runtime[schedule.runtime[calls]]
    return _apply_graph_replay(seconds, schedule, program)


def _apply_graph_replay(seconds: FloatArray, schedule: Schedule, program: Program) -> FloatArray:
    """Host seconds of which a replayed graph keeps its launch only."""
    graphed, launching = (marked[program.columns.scope_name] for marked in find_graph_scopes(program.names))
    if graphed.any():
        seconds[graphed[schedule.scope]] = 0.0
        seconds[np.searchsorted(schedule.scope, np.flatnonzero(launching))] = GRAPH_LAUNCH_SECONDS
    return seconds


def _compute_durations(
    instructions: StepInstructions,
    costs: Costs,
    host: HostProfile,
    uneven: Unevenness | None,
    op_speed: Mapping[str, float],
) -> tuple[list[FloatArray], list[FloatArray]]:
    """Host and kernel seconds of every program."""
    kernel = list_kernel_seconds(instructions, costs, op_speed)
    busy = _list_program_host_seconds(instructions, host)
    if uneven is None:
        return busy, kernel
    uneven.check_room(instructions)
    both = [uneven.applied(seconds, kernel[number], number) for number, seconds in enumerate(busy)]
    return [seconds for seconds, _ in both], [seconds for _, seconds in both]


def list_kernel_seconds(
    instructions: StepInstructions, costs: Costs, op_speed: Mapping[str, float] | None = None
) -> list[FloatArray]:
    """Kernel seconds of every instruction of every program; `op_speed` as in `predict_step`."""
    by_call = np.append(costs.seconds, 0.0)  # -1, no call, is the last
    kernel = [by_call[schedule.call] for schedule in instructions.schedules]
    if not op_speed:
        return kernel
    return [
        seconds / _list_op_speeds(schedule, program, op_speed)
        for seconds, schedule, program in zip(kernel, instructions.schedules, instructions.programs, strict=True)
    ]


def _list_op_speeds(schedule: Schedule, program: Program, op_speed: Mapping[str, float]) -> FloatArray:
    """How many times as fast the kernel of every instruction runs."""
    of_signature = np.array([op_speed.get(signature.name, 1.0) for signature in program.symbolic])
    of_op = np.append(of_signature[program.columns.op_signature], 1.0)  # -1, no op, is the last
    return np.asarray(of_op[schedule.op])


def _delay_start(
    durations: tuple[list[FloatArray], list[FloatArray]], late: float
) -> tuple[list[FloatArray], list[FloatArray]]:
    """Durations with this many seconds before the first instruction; host times that were one object stay so."""
    if not late:
        return durations
    known: dict[int, FloatArray] = {}
    for seconds in durations[0]:
        if id(seconds) not in known:
            known[id(seconds)] = np.concatenate((seconds[:1] + late, seconds[1:]))
    return [known[id(seconds)] for seconds in durations[0]], durations[1]


@lru_cache(maxsize=8)  # each holds a whole step
def _list_program_host_seconds(instructions: StepInstructions, host: HostProfile) -> list[FloatArray]:
    """Host seconds of every program; equal ones are the same object."""
    known: dict[tuple[int, int], FloatArray] = {}
    equal: dict[bytes, FloatArray] = {}
    seconds = []
    for schedule, program in zip(instructions.schedules, instructions.programs, strict=True):
        key = (id(schedule.code), id(program.names))
        if key not in known:
            times = list_host_seconds(schedule, program, host)
            known[key] = equal.setdefault(times.tobytes(), times)
        seconds.append(known[key])
    return seconds


def _classify_programs(
    instructions: StepInstructions, durations: tuple[list[FloatArray], list[FloatArray]], seconds: FloatArray
) -> tuple[Classes, list[RankGroup], tuple[tuple[int, int], ...]]:
    """Classes of programs, the rank groups to simulate, and where each class is among them."""
    busy, kernel = durations
    # equal host times are one object; kernel times are compared by a digest, which takes less room than they do
    alike = [
        (structure, blake2b(kernel[p].data).digest() if len(kernel) > 1 else b"", id(busy[p]))
        for p, structure in enumerate(instructions.structure)
    ]
    classes = find_classes(alike, instructions.calls, instructions.collectives, seconds)
    return classes, *_make_rank_groups(instructions, classes, kernel, busy)


def _make_rank_groups(
    instructions: StepInstructions, classes: Classes, kernel: Sequence[FloatArray], busy: Sequence[FloatArray]
) -> tuple[list[RankGroup], tuple[tuple[int, int], ...]]:
    """Classes of one structure side by side, and the rank group and row of every class."""
    members: dict[int, list[int]] = {}
    for c, program in enumerate(classes.program):
        members.setdefault(instructions.structure[program], []).append(c)
    side_by_side = list(members.values())
    place = {c: (group, row) for group, row_classes in enumerate(side_by_side) for row, c in enumerate(row_classes)}
    groups = []
    for row_classes in side_by_side:
        programs = [classes.program[c] for c in row_classes]
        first = busy[programs[0]]
        same = all(busy[p] is first for p in programs)
        hosts = np.broadcast_to(first, (len(programs), len(first))) if same else np.stack([busy[p] for p in programs])
        schedule = instructions.schedules[programs[0]]
        apart = [which[programs[0]].astype(np.intp) for which in (instructions.uniform, instructions.fills)]
        groups.append(RankGroup(schedule, hosts, np.stack([kernel[p] for p in programs]), *apart))
    return groups, tuple(place[c] for c in range(len(classes.program)))


def _make_collectives(classes: Classes, place: Sequence[tuple[int, int]]) -> Collectives:
    entries = [
        (number, *place[c], instruction)
        for number, collective in enumerate(classes.collectives)
        for c, instruction in collective.members
    ]
    table: IntArray = np.array(entries, dtype=np.int64).reshape(len(entries), 4)
    seconds = np.array([collective.seconds for collective in classes.collectives])
    return Collectives(table[:, 0], table[:, 1], table[:, 2], table[:, 3], seconds)


@dataclass(frozen=True, eq=False, slots=True)
class _Start:
    """Where a step begins: clocks of all ranks (None: idle at 0), when each host does, and when the last one ended."""

    clocks: list[list[Clocks]] | None
    origin: list[FloatArray]
    previous: list[FloatArray]


def _start_clocks(
    groups: Sequence[RankGroup], collectives: Collectives, index: CollectiveIndex, *, synchronised: bool, gap: float
) -> _Start:
    """From idle, or after a step like it: every rank's host goes on where it stands; its streams may be busy."""
    if synchronised:
        zero = [np.zeros(group.size) for group in groups]
        return _Start(None, zero, zero)
    before = simulate_ranks(groups, collectives, gap=gap, index=index)
    clocks = [simulation.clocks() for simulation in before]
    origin = [np.array([max(clock.threads) for clock in group]) for group in clocks]
    again = [[replace(clock, threads=[max(clock.threads)] * len(clock.threads)) for clock in group] for group in clocks]
    return _Start(again, origin, [simulation.latest() for simulation in before])


def _explain_deadlock(
    stuck: Deadlock,
    instructions: StepInstructions,
    classes: Classes,
    collectives: Collectives,
    place: Sequence[tuple[int, int]],
) -> TraincastError:
    """Who waits where for whom, by rank and op."""
    class_at = {where: c for c, where in enumerate(place)}

    def named(entry: int, does: str = "") -> str:
        program = classes.program[class_at[int(collectives.group[entry]), int(collectives.row[entry])]]
        call = int(np.searchsorted(instructions.calls[program].instruction, collectives.instruction[entry]))
        return instructions.describe.who(program, does, f" at {instructions.describe.call(program, call)}")

    waiting = [launch for launch in stuck.waiting[:4] if launch.missing]
    lines = [f"{named(launch.entry, 'wait')} for {named(launch.missing[0])}" for launch in waiting]
    return TraincastError(
        "ranks wait for each other for ever (they disagree on the order of collectives): " + "; ".join(lines)
    )


@dataclass(frozen=True, kw_only=True)
class Unevenness:
    """How ranks differ from each other by chance, the same for the same `seed`.

    The host of each rank begins its step up to `skew_ms` milliseconds late (data loading, uniformly), and every
    kernel and stretch of host work takes longer by the size of a normal variable of `jitter` of its time. Both only
    delay: a step with them is never shorter than without.
    """

    skew_ms: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.skew_ms <= 1e6 or not 0 <= self.jitter <= 10 or self.seed < 0:
            raise TraincastError(
                f"skew {self.skew_ms:g} ms, jitter {self.jitter:g} and seed {self.seed} must not be negative "
                "(skew at most 1e6 ms, jitter at most 10)"
            )

    def check_room(self, instructions: StepInstructions) -> None:
        """Rejects a step of which every rank by itself is more than is simulated."""
        sizes = [len(schedule.code) for schedule in instructions.schedules]
        if sum(sizes) > _MOST_UNEVEN:
            raise TraincastError(
                f"with `skew_ms` or `jitter` each of {len(sizes)} GPUs is simulated by itself, which takes too much "
                f"memory for steps of this length; give at most {_MOST_UNEVEN // max(sizes)} `gpus`, or leave them out"
            )

    def applied(self, host: FloatArray, kernel: FloatArray, rank: int) -> tuple[FloatArray, FloatArray]:
        """Host and kernel seconds of one rank."""
        draw = np.random.default_rng((self.seed, rank))
        late = draw.uniform(0.0, 1e-3 * self.skew_ms)
        host = host * (1.0 + np.abs(draw.normal(0.0, self.jitter, len(host))))
        kernel = kernel * (1.0 + np.abs(draw.normal(0.0, self.jitter, len(kernel))))
        host[:1] += late
        return host, kernel

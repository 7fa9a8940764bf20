"""A step as instructions of every program, its collectives matched, and which programs cannot differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import Estimate, KernelCall
from traincast.costs.kernels.lower import LoweredProgram, lower_programs
from traincast.costs.kernels.registry import LoweringContext
from traincast.ir.ops import UNIFORM
from traincast.ir.program import Program
from traincast.simulator.collective_calls import (
    CollectiveCalls,
    CollectiveFinder,
    Describe,
    MatchedCollective,
    match_calls,
)
from traincast.simulator.schedule import Schedule, Scheduler
from traincast.utils.arrays import FloatArray, IntArray
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.hardware.topology import Topology


@dataclass(frozen=True, eq=False, slots=True)
class StepInstructions:
    """Programs as instructions. All `lowered` share their calls; `calls[p]` are the collectives of program p.

    `structure[p]` is equal for programs with equal instructions and places of collectives, `ranks_of[p]` are the ranks
    of a program. `collective_call` has a row (collective, kernel call) for every call that takes part in a collective.
    `uniform[p]` are the instructions of program p that launch collectives among ranks which all run that program,
    `fills[p]` those that launch kernels which fill a cache from host memory.
    """

    programs: tuple[Program, ...]
    ranks: tuple[int, ...]
    lowered: tuple[LoweredProgram, ...]
    schedules: tuple[Schedule, ...]
    calls: tuple[CollectiveCalls, ...]
    collectives: tuple[MatchedCollective, ...]
    describe: Describe
    structure: tuple[int, ...]
    ranks_of: tuple[tuple[int, ...], ...]
    collective_call: IntArray
    uniform: tuple[IntArray, ...]
    fills: tuple[IntArray, ...]

    def uniform_seconds(self, topology: Topology | None) -> tuple[IntArray, Estimate]:
        """The calls of collectives whose ranks all run one program, and how long each takes on this topology."""
        return _compute_uniform_seconds(self, topology)

    def seconds(self, topology: Topology | None) -> Estimate:
        """How long every collective takes on this topology."""
        return _compute_collective_seconds(self, topology)


@lru_cache(maxsize=8)
def build_step_instructions(
    programs: tuple[Program, ...], ranks: tuple[int, ...], context: LoweringContext
) -> StepInstructions:
    """Lowers the programs and finds out who meets whom; `ranks[r]` is the program of rank r."""
    lowered = lower_programs(programs, context)
    scheduler, finder = Scheduler(lowered[0].calls), CollectiveFinder(lowered[0])
    schedules = tuple(scheduler.schedule(p, low) for p, low in zip(programs, lowered, strict=True))
    calls = tuple(finder.calls(p, s, low) for p, s, low in zip(programs, schedules, lowered, strict=True))
    kept = tuple(replace(low, signatures=(), plain=()) for low in lowered)  # no longer needed, and large
    return join_instructions(programs, ranks, kept, schedules, calls)


def join_instructions(
    programs: tuple[Program, ...],
    ranks: tuple[int, ...],
    lowered: tuple[LoweredProgram, ...],
    schedules: tuple[Schedule, ...],
    calls: tuple[CollectiveCalls, ...],
) -> StepInstructions:
    """Finds out which ranks meet in which collectives; `ranks[r]` is the program of rank r."""
    describe = Describe(ranks, [_Labels(p, s, c) for p, s, c in zip(programs, schedules, calls, strict=True)])
    collectives = tuple(match_calls(ranks, calls, describe))
    kernel = [schedule.call[made.instruction].tolist() for schedule, made in zip(schedules, calls, strict=True)]
    ranks_of: list[list[int]] = [[] for _ in programs]
    for rank, program in enumerate(ranks):
        ranks_of[program].append(rank)
    pairs = {
        (m, kernel[part.program][part.call])
        for m, collective in enumerate(collectives)
        for part in collective.participants
    }
    return StepInstructions(
        programs=programs,
        ranks=ranks,
        lowered=lowered,
        schedules=schedules,
        calls=calls,
        collectives=collectives,
        describe=describe,
        structure=_number_structures(schedules, calls),
        ranks_of=tuple(tuple(running) for running in ranks_of),
        collective_call=np.array(sorted(pairs), dtype=np.int64).reshape(len(pairs), 2),
        uniform=_find_launches(lowered[0], schedules, _is_uniform),
        fills=_find_launches(lowered[0], schedules, lambda call: call.kind == "cache_fill"),
    )


def _is_uniform(call: KernelCall) -> bool:
    return call.family is COLLECTIVE and UNIFORM in call.variant.split()


def _find_launches(
    lowered: LoweredProgram, schedules: Sequence[Schedule], wanted: Callable[[KernelCall], bool]
) -> tuple[IntArray, ...]:
    found = np.append(np.array([wanted(call) for call in lowered.calls], dtype=np.bool_), False)
    if not found.any():
        return (np.empty(0, dtype=np.int64),) * len(schedules)
    return tuple(np.flatnonzero(found[schedule.call]) for schedule in schedules)


class _Labels(Sequence[str]):
    """What each collective call of a program is called in messages; made when asked for."""

    def __init__(self, program: Program, schedule: Schedule, calls: CollectiveCalls) -> None:
        self.program, self.schedule, self.calls = program, schedule, calls

    def __len__(self) -> int:
        return len(self.calls.instruction)

    def __getitem__(self, call: int) -> str:  # type: ignore[override]
        op = int(self.schedule.op[self.calls.instruction[call]])
        name = self.program.symbolic[self.program.columns.op_signature[op]].name
        module = self.program.names[self.program.columns.op_module[op]]
        return f"{name} (op {op}" + (f" of {module})" if module else ")")


def _number_structures(schedules: Sequence[Schedule], calls: Sequence[CollectiveCalls]) -> tuple[int, ...]:
    known: dict[tuple[bytes, ...], int] = {}
    same: dict[tuple[int, bytes], int] = {}  # schedules made from one template have the same columns
    numbers = []
    for schedule, made in zip(schedules, calls, strict=True):
        key = (id(schedule.code), made.instruction.tobytes())
        if key not in same:
            columns = (schedule.code, schedule.thread, schedule.target, schedule.event, made.instruction)
            same[key] = known.setdefault(tuple(column.tobytes() for column in columns), len(known))
        numbers.append(same[key])
    return tuple(numbers)


@lru_cache(maxsize=8)  # each holds a whole step
def _compute_uniform_seconds(instructions: StepInstructions, topology: Topology | None) -> tuple[IntArray, Estimate]:
    calls = instructions.lowered[0].calls
    rows = np.array([row for row, call in enumerate(calls) if _is_uniform(call)], dtype=np.int64)
    if not len(rows):
        return rows, Estimate.zeros(0)
    if topology is None:
        raise _make_no_links_error()
    from traincast.costs.collectives.model import price_uniform

    return rows, price_uniform([calls[row] for row in rows.tolist()], topology)


def _make_no_links_error() -> TraincastError:
    return TraincastError(
        "the platform says nothing of the links between its GPUs; name a node such as dgx-a100, or describe yours"
    )


@lru_cache(maxsize=8)  # each holds a whole step
def _compute_collective_seconds(instructions: StepInstructions, topology: Topology | None) -> Estimate:
    if not instructions.collectives:
        return Estimate(np.empty(0), np.empty(0), np.empty(0, dtype=np.bool_))
    if topology is None:
        raise _make_no_links_error()
    from traincast.simulator.collective_cost import compute_collective_seconds  # one GPU needs no curves of collectives

    return compute_collective_seconds(instructions.collectives, instructions.ranks, topology, instructions.describe)


@dataclass(frozen=True, eq=False, slots=True)
class ClassCollective:
    """A collective between classes: (class, instruction) of all that take part, and its duration in seconds.

    Several collectives of a step may be one of these: eight nodes that each sum within the node, say.
    """

    members: tuple[tuple[int, int], ...]
    seconds: float
    collective: int  # one of the collectives it stands for


@dataclass(frozen=True, eq=False, slots=True)
class Classes:
    """`of[program]` is the class of a program, `program[c]` one program of class c."""

    of: tuple[int, ...]
    program: tuple[int, ...]
    collectives: tuple[ClassCollective, ...]


def find_classes(
    alike: Sequence[Hashable],
    calls: Sequence[CollectiveCalls],
    collectives: Sequence[MatchedCollective],
    seconds: FloatArray,
) -> Classes:
    """Classes of programs; `alike[p]` is equal for programs that are equal but for whom they meet."""
    colour = _number_by_first_appearance(alike)
    parts = [
        [(part.program, int(calls[part.program].instruction[part.call])) for part in collective.participants]
        for collective in collectives
    ]
    lasts = seconds.tolist()
    while True:
        met = [(lasts[m], tuple(sorted({(colour[p], i) for p, i in part}))) for m, part in enumerate(parts)]
        if len(set(colour)) == len(colour):
            break
        number = _number_by_first_appearance(met)
        seen: list[list[tuple[int, int]]] = [[] for _ in colour]
        for m, part in enumerate(parts):
            for p, i in part:
                seen[p].append((i, number[m]))
        finer = _number_by_first_appearance([(colour[p], tuple(sorted(seen[p]))) for p in range(len(colour))])
        if len(set(finer)) == len(set(colour)):
            break
        colour = finer
    distinct = {key: m for m, key in reversed(list(enumerate(met)))}
    return Classes(
        of=tuple(colour),
        program=tuple(colour.index(c) for c in range(max(colour) + 1)),
        collectives=tuple(
            ClassCollective(key[1], key[0], m) for key, m in sorted(distinct.items(), key=lambda kv: kv[1])
        ),
    )


def _number_by_first_appearance(things: Sequence[Hashable]) -> list[int]:
    """Each thing's number in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in things]

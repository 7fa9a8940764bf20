"""Programs whose ranks do the same at the same time are simulated once.

Two programs belong to one class when their instructions and durations are equal and, collective by collective, they
meet the same classes at the same instructions. Classes are found by refinement: programs start together if they look
alike alone, and are separated until no collective tells the members of a class apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from traincast.simulator.collective_calls import CollectiveCalls
from traincast.simulator.matched_calls import MatchedCollective
from traincast.utils.arrays import FloatArray


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
    meetings: tuple[ClassCollective, ...]


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
        meetings=tuple(ClassCollective(key[1], key[0], m) for key, m in sorted(distinct.items(), key=lambda kv: kv[1])),
    )


def _number_by_first_appearance(things: Sequence[Hashable]) -> list[int]:
    """Each thing's number in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in things]

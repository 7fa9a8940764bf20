"""Known numbers that ranks send each other in collectives while they are captured one after the other.

A rank that is captured before another takes that one to send what it sends itself. Once all have been captured it is
seen which of the numbers that a step has read were others: those ranks are captured again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MOST = 1 << 16  # elements of one message that are kept for other ranks
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank gives to a collective; `rows` go to each rank of an all-to-all that is not even."""

    tensors: tuple[torch.Tensor, ...]
    rows: tuple[int, ...] = ()


Made = tuple[torch.Tensor, ...] | None
Make = Callable[[Sequence[Message]], Made]
"""The results of a collective on one rank, from the messages of all."""


@dataclass(slots=True, eq=False)
class ValueCollective:
    """One collective of known numbers as a rank has seen it. `read` is where a step first asked for its numbers;
    what is too much to be kept has no `own`."""

    key: Key
    ranks: tuple[int, ...]
    own: Message | None
    make: Make
    made: Made
    read: str = ""


class CollectiveValues:
    """All such collectives of the ranks captured so far."""

    def __init__(self) -> None:
        self._sent: dict[tuple[Key, int], Message] = {}
        self._counts: Counter[Key] = Counter()
        self._done: dict[int, list[ValueCollective]] = {}
        self._mine: list[ValueCollective] = []

    def begin_rank(self, rank: int) -> None:
        """A rank is captured, perhaps again."""
        self._counts.clear()
        self._mine = self._done[rank] = []

    def make_key(self, kind: str, group: str, ranks: tuple[int, ...]) -> Key:
        """The name of the next collective of a kind: the same on all ranks of its group."""
        place = (kind, group, ranks)
        self._counts[place] += 1
        return (*place, self._counts[place])

    def communicate(self, key: Key, rank: int, own: Message, make: Make) -> tuple[Made, ValueCollective]:
        """What this rank gets in a collective, with what the others are known to send."""
        ranks: tuple[int, ...] = key[2]
        if sum(tensor.numel() for tensor in own.tensors) > _MOST:
            self._sent.pop((key, rank), None)
            made = make([own] * len(ranks))
            done = ValueCollective(key, ranks, None, make, None)
        else:
            self._sent[key, rank] = own = Message(tuple(tensor.clone() for tensor in own.tensors), own.rows)
            made = make(self._list_messages(key, own))
            done = ValueCollective(key, ranks, own, make, made)
        self._mine.append(done)
        return made, done

    def find_stale_ranks(self) -> list[int]:
        """Ranks that have read other numbers than those which the others turned out to send."""
        return [
            rank for rank, mine in self._done.items()
            if any(d.read and d.own and not _are_equal(d.made, d.make(self._list_messages(d.key, d.own))) for d in mine)
        ]  # fmt: skip

    @property
    def differ(self) -> bool:
        """Whether a rank has read what another would not have sent to itself."""
        return any(
            done.read and done.own and not _are_equal(done.made, done.make([done.own] * len(done.ranks)))
            for mine in self._done.values() for done in mine
        )  # fmt: skip

    def list_assumed_places(self) -> list[str]:
        """Where numbers of ranks were read that are not known to have sent them."""
        lines = {
            done.read: None for mine in self._done.values() for done in mine
            if done.read and any((done.key, rank) not in self._sent for rank in done.ranks)
        }  # fmt: skip
        return list(lines)

    def _list_messages(self, key: Key, own: Message) -> list[Message]:
        return [self._sent.get((key, rank), own) for rank in key[2]]


def _are_equal(one: Made, other: Made) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(map(torch.equal, one, other))

"""What ranks send each other while they are captured one after the other: known numbers, and Python objects.

A rank that is captured before another takes that one to send what it sends itself. Once all have been captured it is
seen which of the numbers that a step has read were others: those ranks are captured again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from traincast.capturing.patches import Patches
from traincast.utils.errors import TraincastError

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


_NAMES = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
          "recv_object_list")  # fmt: skip


class RankNotCapturedError(TraincastError):
    """A rank waits for an object of one that has not got that far: it is captured again once the others have been."""


class ObjectMessages:
    """What all ranks have posted so far; `numbers` are those of collectives.

    Each capture of a rank counts its messages from the start.
    """

    def __init__(self) -> None:
        self.used = False
        self.numbers = CollectiveValues()
        self._posted: dict[tuple[Any, ...], Any] = {}
        self._counts: Counter[tuple[Any, ...]] = Counter()

    def __len__(self) -> int:
        return len(self._posted)

    def install_patches(self, patches: Patches) -> None:
        """Answers PyTorch's collectives of objects until the patches are undone."""
        self._counts.clear()
        self.numbers.begin_rank(dist.get_rank())
        for name in _NAMES:
            result = getattr(self, f"_{name}")
            patches.set_everywhere(dist, name, result)
            patches.set_attribute(dist.distributed_c10d, name, result)

    def _next_key(self, kind: str, group: Any, *ends: int) -> tuple[Any, ...]:
        self.used = True
        used: Any = group or dist.group.WORLD
        key = (kind, str(used.group_name), *ends)
        self._counts[key] += 1
        return (*key, self._counts[key])

    def make_message_key(self, group: Any, source: int, target: int) -> tuple[Any, ...]:
        """The name of the next tensor that one rank sends another."""
        return self._next_key("tensor", group, source, target)

    def post_object(self, key: tuple[Any, ...], value: Any) -> None:
        """Leaves something for other ranks."""
        self._posted[key] = value

    def take_object(self, key: tuple[Any, ...]) -> Any:
        """What another rank has left."""
        if key not in self._posted:
            raise RankNotCapturedError(
                f"rank {dist.get_rank()} waits for an object that no other rank sends; capture all ranks, and let each "
                "send what the others receive"
            )
        return self._posted[key]

    def _send_object_list(
        self, object_list: list[Any], dst: int | None = None, group: Any = None, device: Any = None,
        group_dst: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        key = self._next_key("message", group, dist.get_rank(), _find_global_rank(group, dst, group_dst))
        self._posted[key] = list(object_list)

    def _recv_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
        group_src: int | None = None, **options: Any,
    ) -> int:  # fmt: skip
        source = _find_global_rank(group, src, group_src)
        object_list[:] = self.take_object(self._next_key("message", group, source, dist.get_rank()))
        return source

    def _broadcast_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
        group_src: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        source = _find_global_rank(group, src, group_src)
        key = self._next_key("broadcast", group, source)
        if dist.get_rank() == source:
            self._posted[key] = list(object_list)
        object_list[:] = self.take_object(key)

    def _all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = self._gather_objects("all_gather", obj, group)

    def _gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, group: Any = None,
        group_dst: int | None = None,
    ) -> None:  # fmt: skip
        target = _find_global_rank(group, dst, group_dst)
        key = self._next_key("gather", group, target)
        self._posted[(*key, dist.get_rank())] = obj
        if dist.get_rank() == target and object_gather_list is not None:
            object_gather_list[:] = [self.take_object((*key, rank)) for rank in _list_ranks(group)]

    def _scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
        src: int | None = None, group: Any = None, group_src: int | None = None,
    ) -> None:  # fmt: skip
        source = _find_global_rank(group, src, group_src)
        key = self._next_key("scatter", group, source)
        if dist.get_rank() == source:
            self._posted[key] = list(scatter_object_input_list or ())
        scatter_object_output_list[0] = self.take_object(key)[_list_ranks(group).index(dist.get_rank())]

    def _gather_objects(self, kind: str, own: Any, group: Any) -> list[Any]:
        key = self._next_key(kind, group)
        self._posted[(*key, dist.get_rank())] = own
        return [self.take_object((*key, rank)) for rank in _list_ranks(group)]


def _list_ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _find_global_rank(group: Any, rank: int | None, in_group: int | None) -> int:
    """The global rank of an end that is named by its global rank or by its place in the group."""
    return _list_ranks(group)[in_group] if in_group is not None else rank or 0

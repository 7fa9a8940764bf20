"""What known values become in a collective: from those of all ranks, as far as they are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from traincast.capturing.collectives import Collective
from traincast.capturing.messages import CollectiveValues, Made, Message
from traincast.capturing.values import Values

_SENT = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors")
_REDUCED: dict[str, Any] = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}


def communicate_values(
    values: Values,
    numbers: CollectiveValues,
    collective: Collective,
    arguments: list[tuple[str, Any]],
    outputs: list[torch.Tensor],
    reduction: Any = None,
) -> None:
    """Gives the outputs of a collective their values, where those of its inputs are known. `reduction` is what a call
    of PyTorch's module asked for; an op does not show it."""
    named = {"reduce_op": reduction, **{name: v for name, v in arguments if name != "reduce_op" or isinstance(v, str)}}
    sent = next((_flatten_tensors(named[name]) for name in _SENT if name in named), [])
    known = [value for tensor in sent if (value := values.get_values(tensor)) is not None]
    kind, ranks, group = _find_kind(collective, named), collective.ranks, collective.group
    key = numbers.make_key(kind, str(group.group_name), ranks)
    if not sent or len(known) < len(sent) or kind not in _MAKERS:
        for output in outputs:
            values.replace_values(output, None)
        return
    own = Message(tuple(value.reshape(-1) for value in known), tuple(named.get("input_split_sizes") or ()))
    me, root = group.rank(), next((ranks.index(rank) for name, rank in collective.ends if name == "root"), 0)
    asked = str(named["reduce_op"]).rpartition(".")[2].lower()
    sizes = tuple(output.numel() for output in outputs)
    make = partial(_MAKERS[kind], me=me, root=root, asked=asked, sizes=sizes)
    made, done = numbers.communicate(key, ranks[me], own, make)
    for number, output in enumerate(outputs):
        values.replace_values(output, made[number] if made is not None and number < len(made) else None)
        values.note_origin(output, done)


def _find_kind(collective: Collective, named: dict[str, Any]) -> str:
    """The same on all ranks of a call, whether what each of them has is even or not."""
    if collective.kind not in ("all_to_all", "all_to_all_v"):
        return collective.kind
    if not collective.ends:
        return "all_to_all"
    return "gather" if len(_flatten_tensors(named["input_tensors"])) == 1 else "scatter"


def _reduce_messages(messages: Sequence[Message], *, me: int, root: int, asked: str, sizes: tuple[int, ...]) -> Made:
    combine = _REDUCED.get(asked)
    if combine is None or not _are_alike(messages):
        return None
    made = tuple(reduce(combine, parts) for parts in zip(*(m.tensors for m in messages), strict=True))
    if asked != "avg":
        return made
    return tuple(m // len(messages) if not m.dtype.is_floating_point else m / len(messages) for m in made)


def _broadcast_message(messages: Sequence[Message], *, me: int, root: int, asked: str, sizes: tuple[int, ...]) -> Made:
    return messages[root].tensors if _are_alike(messages) else messages[me].tensors


def _gather_messages(messages: Sequence[Message], *, me: int, root: int, asked: str, sizes: tuple[int, ...]) -> Made:
    own = messages[me].tensors
    parts = [m.tensors if len(m.tensors) == len(own) else own for m in messages]
    if len(own) == 1 and len(sizes) == len(messages):
        return tuple(_repeat_to_fill(part[0], size) for part, size in zip(parts, sizes, strict=True))
    if len(own) != len(sizes):
        return None
    return tuple(_repeat_to_fill(torch.cat(blocks), size) for *blocks, size in zip(*parts, sizes, strict=True))


def _scatter_messages(messages: Sequence[Message], *, me: int, root: int, asked: str, sizes: tuple[int, ...]) -> Made:
    """From every rank what it has for this one, as often as it takes to fill what was asked for."""
    parts = [_select_for_rank(message, me, len(messages)) for message in messages]
    if len(sizes) == len(parts):
        return tuple(_repeat_to_fill(part, size) for part, size in zip(parts, sizes, strict=True))
    return tuple(_repeat_to_fill(torch.cat(parts), size) for size in sizes)


def _select_for_rank(message: Message, rank: int, world: int) -> torch.Tensor:
    """What a message of an all-to-all holds for one of the ranks."""
    if len(message.tensors) == world:
        return message.tensors[rank]
    (whole,) = message.tensors
    rows = message.rows or (1,) * world
    width = whole.numel() // max(1, sum(rows))
    start = sum(rows[:rank]) * width
    return whole[start : start + rows[rank] * width]


def _are_alike(messages: Sequence[Message]) -> bool:
    return len({tuple(tensor.shape for tensor in message.tensors) for message in messages}) == 1


def _repeat_to_fill(part: torch.Tensor, count: int) -> torch.Tensor:
    if not part.numel():
        return part.new_zeros(count)
    return part.repeat(-(-count // part.numel()))[:count]


_MAKERS = {
    "all_reduce": _reduce_messages,
    "reduce": _reduce_messages,
    "broadcast": _broadcast_message,
    "all_gather": _gather_messages,
    "gather": _gather_messages,
    "all_to_all": _scatter_messages,
}


def _flatten_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _flatten_tensors(item)] if isinstance(value, (list, tuple)) else []

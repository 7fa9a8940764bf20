"""What known values become in a collective: as if every other rank had what this one has."""

from __future__ import annotations

from typing import Any

import torch

from traincast.capturing.collectives import Collective
from traincast.capturing.values import Values

_SENT = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors")

_ADDED = -1
_FACTORS = {"sum": _ADDED, "avg": 1, "max": 1, "min": 1}  # what equal numbers of all ranks become


def exchange(
    values: Values,
    collective: Collective,
    arguments: list[tuple[str, Any]],
    outputs: list[torch.Tensor],
    reduction: Any = None,
) -> None:
    """Gives the outputs of a collective their values, where those of its inputs are known. `reduction` is what a call
    of PyTorch's module asked for; an op does not show it."""
    named = {"reduce_op": reduction, **{name: v for name, v in arguments if name != "reduce_op" or isinstance(v, str)}}
    sent = next((_flat(named[name]) for name in _SENT if name in named), [])
    known = [values.of(tensor) for tensor in sent]
    made = None
    if known and all(value is not None for value in known):
        made = _made(collective, [value for value in known if value is not None], named, outputs)
    for number, output in enumerate(outputs):
        values.replace(output, made[number] if made is not None and number < len(made) else None)


def _made(
    collective: Collective, sent: list[torch.Tensor], named: dict[str, Any], outputs: list[torch.Tensor]
) -> list[torch.Tensor] | None:
    size, me = collective.group.size(), collective.group.rank()
    if collective.kind in ("all_reduce", "reduce"):
        factor = _FACTORS.get(str(named["reduce_op"]).rpartition(".")[2].lower(), 0)
        return [value * (size if factor == _ADDED else factor) for value in sent] if factor else None
    if collective.kind in ("broadcast", "send_recv"):
        return sent if collective.kind == "broadcast" else None
    if collective.kind == "all_gather":
        if len(outputs) == size * len(sent) and len(sent) == 1:
            return sent * size
        return [torch.cat([value.reshape(-1)] * size) for value in sent]
    if collective.kind in ("all_to_all", "all_to_all_v"):
        return _dealt(sent, size, me, named, outputs)
    return None


def _dealt(
    sent: list[torch.Tensor], size: int, me: int, named: dict[str, Any], outputs: list[torch.Tensor]
) -> list[torch.Tensor] | None:
    """From every rank, what this one keeps for itself, as often as it takes to fill what was asked for."""
    if len(sent) == size:
        return [_filled(sent[me].reshape(-1), output.numel()) for output in outputs]
    rows = named.get("input_split_sizes") or []
    own = (
        torch.split_with_sizes(sent[0], list(rows))[me]
        if rows
        else sent[0].chunk(size)[me]
        if sent[0].numel()
        else sent[0]
    )
    return [_filled(own.reshape(-1), output.numel()) for output in outputs]


def _filled(part: torch.Tensor, count: int) -> torch.Tensor:
    if not part.numel():
        return part.new_zeros(count)
    return part.repeat(-(-count // part.numel()))[:count]


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _flat(item)] if isinstance(value, (list, tuple)) else []

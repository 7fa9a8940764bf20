"""The arguments of an op by name: its tensors in groups, the rest as plain scalars."""

from __future__ import annotations

from typing import Any

import torch

from traincast.workload.ops import Scalar

Arguments = list[tuple[str, Any]]


def bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """(name, value) of every argument of an op in schema order, defaults filled in."""
    bound: Arguments = []
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            value = args[position]
        else:
            value = kwargs.get(argument.name, argument.default_value)
        bound.append((argument.name, value))
    return bound


def tensor_groups(arguments: Arguments) -> tuple[tuple[tuple[str, int], ...], list[torch.Tensor]]:
    """(argument name, number of strided tensors) of every tensor argument, and the tensors themselves."""
    groups: list[tuple[str, int]] = []
    tensors: list[torch.Tensor] = []
    for name, value in arguments:
        held = [value] if isinstance(value, torch.Tensor) else _tensors_in(value)
        if held:
            groups.append((name, sum(2 if t.layout is torch.sparse_coo else 1 for t in held)))
            tensors.extend(held)
    return tuple(groups), tensors


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if not isinstance(value, (list, tuple)):
        return []
    return [t for item in value for t in ([item] if isinstance(item, torch.Tensor) else _tensors_in(item))]


def scalar_arguments(arguments: Arguments) -> tuple[tuple[str, Scalar], ...]:
    """The arguments that are no tensors, by name.

    Devices are left out: tensors carry them; so is an op's `rank`, or no two ranks would run the same program.
    """
    scalars: list[tuple[str, Scalar]] = []
    for name, value in arguments:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.sparse_coo:
                scalars.append((f"{name}_layout", "sparse_coo"))
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            if any(v is None for v in value):
                scalars.append((f"{name}_given", tuple(v is not None for v in value)))
        elif name not in ("device", "generator", "layout", "pin_memory", "rank"):
            scalars.append((name, _plain(value)))
    return tuple(scalars)


def _plain(value: Any) -> Scalar:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.ScriptObject):
        return _process_group(value)
    return str(value)


def _process_group(value: torch.ScriptObject) -> Scalar:
    """A process group as (name, size); other script objects by type."""
    try:
        group = torch.distributed.ProcessGroup.unbox(value)
        return (str(group.group_name), int(group.size()))
    except (RuntimeError, AttributeError):
        return str(value._type().qualified_name())

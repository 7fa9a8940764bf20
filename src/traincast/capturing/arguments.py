"""What an op's schema says, and its arguments by name: tensors in groups, the rest as plain scalars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from traincast.ir.ops import Scalar

_COMPOSITE, _META = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Meta
_ASKS = "aten::item"  # without data PyTorch has a rejection for it
_known: dict[int, Traits] = {}  # by id of the op, which is held


@dataclass(frozen=True, slots=True, eq=False)
class Traits:
    """`parameters` are (name, whether it is given by name alone, default); `written` the positions of those that the op
    writes into; `fresh` says that results are no views of arguments, as far as the schema tells; `composite` that the
    op is only made of others."""

    func: Any
    name: str
    namespace: str
    overload: str
    parameters: tuple[tuple[str, bool, Any], ...]
    written: tuple[int, ...]
    mutable: bool
    view: bool
    random: bool
    fresh: bool
    composite: bool


def get_traits(func: Any) -> Traits:
    """Those of an `OpOverload`."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = _read_traits(func)
    return found


def _read_traits(func: Any) -> Traits:
    schema = func._schema
    arguments = schema.arguments
    aliases = any(made.alias_info is not None for made in schema.returns)
    return Traits(
        func=func,
        name=schema.name,
        namespace=schema.name.partition("::")[0],
        overload="" if func._overloadname == "default" else func._overloadname,
        parameters=tuple((a.name, a.kwarg_only, a.default_value) for a in arguments),
        written=tuple(position for position, a in enumerate(arguments) if a.is_write),
        mutable=schema.is_mutable,
        view=func.is_view,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        fresh=not (aliases or schema.is_mutable or func.is_view),
        composite=_is_composite(func, schema.name),
    )


def _is_composite(func: Any, name: str) -> bool:
    """Whether there is nothing but the op's parts; ops of the interpreter (`prim::device`) are not PyTorch's own."""
    if not torch._C._dispatch_has_kernel(func.name()):
        return False
    parts = func.has_kernel_for_dispatch_key(_COMPOSITE)
    return bool(parts and (name == _ASKS or not func.has_kernel_for_dispatch_key(_META)))


Arguments = list[tuple[str, Any]]
_PARTS = {torch.sparse_coo: 2, torch.sparse_csr: 3, torch.sparse_csc: 3, torch.sparse_bsr: 3, torch.sparse_bsc: 3}
"""Of how many strided tensors a sparse one is made."""


def bind_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """(name, value) of every argument of an op in schema order, defaults filled in."""
    given = len(args)
    return [
        (name, args[position] if position < given and not by_name else kwargs.get(name, default))
        for position, (name, by_name, default) in enumerate(get_traits(func).parameters)
    ]


def list_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in what an op takes or gives, in order: tensors, and lists, tuples and dictionaries of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return found
    for item in value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple, dict)):
            found.extend(list_tensors(item))
    return found


def group_tensors(arguments: Arguments) -> tuple[tuple[tuple[str, int], ...], list[torch.Tensor]]:
    """(argument name, number of strided tensors) of every tensor argument, and the tensors themselves."""
    groups: list[tuple[str, int]] = []
    tensors: list[torch.Tensor] = []
    for name, value in arguments:
        held = list_tensors(value)
        if held:
            groups.append((name, sum(_PARTS.get(t.layout, 1) for t in held)))
            tensors.extend(held)
    return tuple(groups), tensors


def list_scalars(arguments: Arguments) -> tuple[tuple[str, Scalar], ...]:
    """The arguments that are no tensors, by name.

    Devices are left out: tensors carry them; so is an op's `rank`, or no two ranks would run the same program.
    """
    scalars: list[tuple[str, Scalar]] = []
    for name, value in arguments:
        if isinstance(value, torch.Tensor):
            if value.layout in _PARTS:
                scalars.append((f"{name}_layout", str(value.layout).removeprefix("torch.")))
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            if any(v is None for v in value):
                scalars.append((f"{name}_given", tuple(v is not None for v in value)))
        elif name not in ("device", "generator", "layout", "pin_memory", "rank"):
            scalars.append((name, _convert_scalar(value)))
    return tuple(scalars)


def _convert_scalar(value: Any) -> Scalar:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_convert_scalar(item) for item in value)
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.ScriptObject):
        return _describe_process_group(value)
    if isinstance(value, torch.UntypedStorage):
        return int(value.nbytes())  # its text would be what happens to be in memory
    return str(value)


def _describe_process_group(value: torch.ScriptObject) -> Scalar:
    """A process group as (name, size); other script objects by type."""
    try:
        group = torch.distributed.ProcessGroup.unbox(value)
        return (str(group.group_name), int(group.size()))
    except (RuntimeError, AttributeError):
        return str(value._type().qualified_name())

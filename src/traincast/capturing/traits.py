"""What an op's schema says, asked once: PyTorch makes the result anew each time, and a step asks for every op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

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

"""Shapes of results that are known from before: an op on tensors of the same forms makes tensors of the same forms.

To find a form out, PyTorch runs Python code for most ops, which would take the larger part of a capture; but layers
repeat, a step runs twice, and ranks run the same ops. Only results in memory of their own are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from traincast.capturing.arguments import get_traits

_Metadata = tuple[torch.Size, tuple[int, ...], torch.dtype]
_META = torch.device("meta")
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
PLAIN = frozenset(
    (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)  # fmt: skip
"""Types of arguments that are no tensors."""
_MOST = 1 << 16  # calls that are remembered


class UnsupportedArgumentError(Exception):
    """An argument that no key is made of."""


class MetadataCache:
    """What calls have given so far, by op and by the shapes of all arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[type | None, list[_Metadata | None]]] = {}
        self._never: set[str] = set()  # ops that were seen to give views
        self.shardings: dict[Any, Any] = {}  # see `traincast.capturing.shardings`

    def call_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """The result of `run(func, args, kwargs)`, all of whose tensors have no data."""
        known = get_traits(func)
        if not known.fresh or known.namespace != "aten" or known.name in self._never:
            return run(func, args, kwargs)
        try:
            key = (
                id(known),
                torch.get_default_dtype(),
                _make_key(args),
                *((n, _make_key(v)) for n, v in kwargs.items()),
            )
        except UnsupportedArgumentError:
            return run(func, args, kwargs)
        remembered = self._known.get(key)
        if remembered is not None:
            return _make_result(*remembered)
        result = run(func, args, kwargs)
        described = _describe_result(result, args, kwargs)
        if described is None:
            self._never.add(known.name)
        elif len(self._known) < _MOST:
            self._known[key] = described
        return result


_shared: ContextVar[MetadataCache | None] = ContextVar("forms", default=None)


def get_metadata_cache() -> MetadataCache:
    """Those of the capture that goes on, or new ones."""
    return _shared.get() or MetadataCache()


@contextmanager
def share_metadata_cache() -> Iterator[None]:
    """What is known inside the block is known to all sizes and ranks that are captured there."""
    token = _shared.set(MetadataCache())
    try:
        yield
    finally:
        _shared.reset(token)


def _make_key(value: Any) -> Any:
    """All that the form of a result can depend on. `1`, `1.0` and `True` are equal, and give other types."""
    kind = type(value)
    if kind in _TENSORS:
        if value.layout is not torch.strided or value.dtype.is_complex:
            raise UnsupportedArgumentError
        return value.shape, value.stride(), value.dtype
    if kind in PLAIN:
        return kind, value
    if kind is tuple or kind is list:
        return tuple([_make_key(item) for item in value])
    raise UnsupportedArgumentError


def _make_result(kind: type | None, described: list[_Metadata | None]) -> Any:
    made = [
        None if form is None else torch.empty_strided(form[0], form[1], dtype=form[2], device=_META)
        for form in described
    ]
    return made[0] if kind is None else kind(made)


def _describe_result(result: Any, *arguments: Any) -> tuple[type | None, list[_Metadata | None]] | None:
    """The forms of tensors that were made in memory of their own, with whether they came as a tuple or a list; None for
    any other result."""
    kind = type(result) if type(result) in (tuple, list) else None
    storages = set(_list_storages(arguments))
    described: list[_Metadata | None] = []
    for out in result if kind else (result,):
        if out is None and kind:
            described.append(None)
            continue
        if type(out) is not torch.Tensor or out.layout is not torch.strided or out.dtype.is_complex or not out.is_meta:
            return None
        storage = out.untyped_storage()
        if storage._cdata in storages or out.storage_offset() or storage.nbytes() != _count_bytes(out):
            return None
        storages.add(storage._cdata)
        described.append((out.shape, out.stride(), out.dtype))
    return kind, described


def _list_storages(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()._cdata
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _list_storages(item)
    elif isinstance(value, dict):
        yield from _list_storages(tuple(value.values()))


def _count_bytes(tensor: torch.Tensor) -> int:
    """From the first element to the last, as memory of its own is allocated."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()

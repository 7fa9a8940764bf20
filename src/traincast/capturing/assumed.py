"""Results of ops whose size depends on values, as large as the user has stated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from traincast.capturing.assumptions import Assumptions

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_broadcast: Any = torch.broadcast_shapes


def assumed_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stated: Assumptions) -> Any:
    """What the op gives; None where nothing is stated about it."""
    makers: dict[Any, Callable[..., Any]] = {
        aten.nonzero.default: _nonzero,
        aten.nonzero_numpy.default: _nonzero_numpy,
        aten.masked_select.default: _masked_select,
        aten.index.Tensor: _index,
        aten._unique2.default: _unique,
        aten.unique_dim.default: _unique_dim,
        aten.unique_consecutive.default: _unique,
        aten.bincount.default: _bincount,
        aten.repeat_interleave.Tensor: _repeat_interleave,
    }
    maker = makers.get(func)
    return None if maker is None else maker(stated, *args, **kwargs)


def _empty(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


def _nonzero(stated: Assumptions, x: torch.Tensor) -> Any:
    count = stated.count(x.numel())
    return None if count is None else _empty(x, count, x.dim(), dtype=torch.int64)


def _nonzero_numpy(stated: Assumptions, x: torch.Tensor) -> Any:
    count = stated.count(x.numel())
    return None if count is None else [_empty(x, count, dtype=torch.int64) for _ in range(max(1, x.dim()))]


def _masked_select(stated: Assumptions, x: torch.Tensor, mask: torch.Tensor) -> Any:
    count = stated.count(_broadcast(x.shape, mask.shape).numel())
    return None if count is None else _empty(x, count)


def _index(stated: Assumptions, x: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
    """Each mask becomes as many indices as it has dimensions; all masks of one call keep as many elements."""
    places: list[torch.Tensor | None] = []
    count: int | None = None
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            places.append(None if index is None else index.to("meta"))
            continue
        count = stated.count(index.numel()) if count is None else count
        if count is None:
            return None
        places += [_empty(index, count, dtype=torch.int64) for _ in range(index.dim())]
    return aten.index.Tensor(x.to("meta"), places)


def _unique(
    stated: Assumptions, x: torch.Tensor, sorted_or_inverse: bool = True, inverse: bool = False, counts: bool = False
) -> Any:
    count = stated.count(x.numel(), kind="distinct")
    if count is None:
        return None
    return _empty(x, count), torch.empty_like(x, dtype=torch.int64), _empty(x, count, dtype=torch.int64)


def _unique_dim(stated: Assumptions, x: torch.Tensor, dim: int, *rest: bool) -> Any:
    count = stated.count(x.shape[dim], kind="distinct")
    if count is None:
        return None
    shape = list(x.shape)
    shape[dim] = count
    return _empty(x, *shape), _empty(x, x.shape[dim], dtype=torch.int64), _empty(x, count, dtype=torch.int64)


def _bincount(stated: Assumptions, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    experts = stated.experts(x.numel())
    if experts is None and not minlength:
        return None
    if experts is None:
        stated.take(f"numbers that are counted lie below minlength, {minlength}")
    return _empty(x, max(minlength, experts or 0), dtype=torch.int64 if weights is None else weights.dtype)


def _repeat_interleave(stated: Assumptions, repeats: torch.Tensor, *, output_size: int | None = None) -> Any:
    lengths = stated.numbers(repeats.numel())
    return None if lengths is None else _empty(repeats, sum(lengths), dtype=torch.int64)

"""Results of ops whose size depends on values, as large as the user has stated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from traincast.capturing.assumptions import Assumptions

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_broadcast: Any = torch.broadcast_shapes


def make_assumed_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stated: Assumptions) -> Any:
    """What the op gives; None where nothing is stated about it."""
    makers: dict[Any, Callable[..., Any]] = {
        aten.nonzero.default: _assume_nonzero,
        aten.nonzero_numpy.default: _assume_nonzero_numpy,
        aten.masked_select.default: _assume_masked_select,
        aten.index.Tensor: _assume_index,
        aten._unique2.default: _assume_unique,
        aten.unique_dim.default: _assume_unique_dim,
        aten.unique_consecutive.default: _assume_unique,
        aten.bincount.default: _assume_bincount,
        aten.repeat_interleave.Tensor: _repeat_interleave,
    }
    maker = makers.get(func)
    return None if maker is None else maker(stated, *args, **kwargs)


def _make_empty(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


def _assume_nonzero(stated: Assumptions, x: torch.Tensor) -> Any:
    count = stated.find_count(x.numel())
    return None if count is None else _make_empty(x, count, x.dim(), dtype=torch.int64)


def _assume_nonzero_numpy(stated: Assumptions, x: torch.Tensor) -> Any:
    count = stated.find_count(x.numel())
    return None if count is None else [_make_empty(x, count, dtype=torch.int64) for _ in range(max(1, x.dim()))]


def _assume_masked_select(stated: Assumptions, x: torch.Tensor, mask: torch.Tensor) -> Any:
    count = stated.find_count(_broadcast(x.shape, mask.shape).numel())
    return None if count is None else _make_empty(x, count)


def _assume_index(stated: Assumptions, x: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
    """Each mask becomes as many indices as it has dimensions; all masks of one call keep as many elements."""
    places: list[torch.Tensor | None] = []
    count: int | None = None
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            places.append(None if index is None else index.to("meta"))
            continue
        count = stated.find_count(index.numel()) if count is None else count
        if count is None:
            return None
        places += [_make_empty(index, count, dtype=torch.int64) for _ in range(index.dim())]
    return aten.index.Tensor(x.to("meta"), places)


def _assume_unique(
    stated: Assumptions, x: torch.Tensor, sorted_or_inverse: bool = True, inverse: bool = False, counts: bool = False
) -> Any:
    count = stated.find_count(x.numel(), kind="distinct")
    if count is None:
        return None
    return _make_empty(x, count), torch.empty_like(x, dtype=torch.int64), _make_empty(x, count, dtype=torch.int64)


def _assume_unique_dim(stated: Assumptions, x: torch.Tensor, dim: int, *rest: bool) -> Any:
    count = stated.find_count(x.shape[dim], kind="distinct")
    if count is None:
        return None
    shape = list(x.shape)
    shape[dim] = count
    return (
        _make_empty(x, *shape),
        _make_empty(x, x.shape[dim], dtype=torch.int64),
        _make_empty(x, count, dtype=torch.int64),
    )


def _assume_bincount(
    stated: Assumptions, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> Any:
    experts = stated.find_expert_count(x.numel())
    if experts is None and not minlength:
        return None
    if experts is None:
        stated.note_assumption(f"numbers that are counted are below minlength, {minlength}")
    return _make_empty(x, max(minlength, experts or 0), dtype=torch.int64 if weights is None else weights.dtype)


def _repeat_interleave(stated: Assumptions, repeats: torch.Tensor, *, output_size: int | None = None) -> Any:
    lengths = stated.find_numbers(repeats.numel())
    return None if lengths is None else _make_empty(repeats, sum(lengths), dtype=torch.int64)

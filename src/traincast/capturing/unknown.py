"""Numbers a step asks of the device, which a capture cannot know, and results as large as the user has stated."""

from __future__ import annotations

import dis
import numbers
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from traincast.capturing.assumptions import Assumptions, get_assumptions
from traincast.capturing.errors import ITEM, reject_values

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


_REMEDY = f"use a Python int that is known before the step, or state it: {ITEM}"
_DECIDED = "a number read from a tensor decides as 0 would"


_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


def _make_comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    return lambda number, other: bool(number._decide(compare, other))


class UnknownInt:
    """An integer read from a tensor without values: it can be counted and printed, and decides nothing.

    Sums and products with it are unknown too. In the recorded step it is rejected to compare it, to make a plain
    number, an index or a size of it; elsewhere it is 0 then, and the answer says so.
    """

    __slots__ = ()

    def _make_unknown(self, *others: object) -> Any:
        return NotImplemented if isinstance(others[0] if others else None, torch.Tensor) else UnknownInt()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _make_unknown
    __mod__ = __rmod__ = __pow__ = __rpow__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _make_unknown
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _make_unknown
    __neg__ = __pos__ = __abs__ = __round__ = __ceil__ = __floor__ = __trunc__ = _make_unknown

    def __truediv__(self, other: object) -> Any:
        return NotImplemented if isinstance(other, torch.Tensor) else UnknownFloat()

    __rtruediv__ = __truediv__

    def _decide(self, compare: Callable[..., bool], *others: object) -> bool:
        stated = get_assumptions()
        decided = stated.find_decision()
        if decided is not None:
            return decided
        if stated.in_step:
            raise reject_values("a decision on tensor.item()", f"take it outside the step, or state it: {ITEM}")
        stated.note_assumption(_DECIDED)
        return compare(0, *[0 if isinstance(other, UnknownInt) else other for other in others])

    def __bool__(self) -> bool:
        return self._decide(bool)

    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = map(_make_comparison, _COMPARISONS)

    def __hash__(self) -> int:
        if get_assumptions().in_step:
            raise reject_values("tensor.item() as a key", _REMEDY)
        return 0

    def __index__(self) -> int:
        return self._make_plain("tensor.item() as an index, a size or a count")

    def __int__(self) -> int:
        frame = sys._getframe(1)  # "%d" % number prints it
        formats = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "BINARY_OP" if frame.f_lasti >= 0 else False
        return 0 if formats else self._make_plain("int(tensor.item())")

    def __float__(self) -> float:
        get_assumptions().note_assumption("a number read from a tensor is taken to be 0.0")
        return 0.0

    def _make_plain(self, what: str) -> int:
        stated = get_assumptions()
        number = stated.find_number()
        if number is not None:
            return number
        if stated.in_step:
            raise reject_values(what, _REMEDY)
        stated.note_assumption("a number read from a tensor is taken to be 0")
        return 0

    def __repr__(self) -> str:
        return "0"

    def __format__(self, form: str) -> str:
        return format(0, form)

    def item(self) -> UnknownInt:
        """As numbers of numpy have it."""
        return self


numbers.Integral.register(UnknownInt)


class UnknownFloat(float):
    """A fraction read from a tensor without values, 0.0: where it decides something the answer says so, and whole
    numbers made of it are unknown."""

    __slots__ = ()

    def _make_unknown(self, *others: object) -> Any:
        return NotImplemented if isinstance(others[0] if others else None, torch.Tensor) else UnknownFloat()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _make_unknown
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _make_unknown

    def _make_unknown_int(self, *others: object) -> Any:
        if isinstance(others[0] if others else None, torch.Tensor):
            return NotImplemented
        return UnknownFloat() if others and others[0] is not None else UnknownInt()

    __round__ = __ceil__ = __floor__ = __trunc__ = __floordiv__ = __rfloordiv__ = _make_unknown_int

    def __int__(self) -> Any:
        return UnknownInt().__index__()

    def _decide(self, compare: Callable[[float, Any], bool], other: object) -> bool:
        stated = get_assumptions()
        decided = stated.find_decision()
        if decided is not None:
            return decided
        stated.note_assumption("a fraction read from a tensor decides as 0.0 would")
        return compare(0.0, float.__add__(other, 0.0) if isinstance(other, UnknownFloat) else other)

    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = map(_make_comparison, _COMPARISONS)

    def __bool__(self) -> bool:
        return self._decide(lambda a, b: bool(a), 0.0)

    __hash__ = float.__hash__


def reject_unknown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Rejects a call of torch that would use an unknown number, be it as a size, an index or an operand."""
    if any(type(value) is UnknownInt for value in tree_iter((args, kwargs))):
        raise reject_values("tensor.item() as a size or an argument", _REMEDY)

"""Numbers a step asks of the device, which a capture without a GPU cannot know."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_iter

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.errors import ITEM, reject_values

_REMEDY = f"use a Python int that is known before the step, or state it: {ITEM}"


class UnknownInt(int):
    """An integer read from a tensor without values: it can be counted and printed, and decides nothing.

    Sums and GEMMs with it are unknown too; comparing it, or making a size of it, is rejected.
    """

    def _make_unknown(self, *others: object) -> UnknownInt:
        return UnknownInt()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = _make_unknown
    __neg__ = __abs__ = _make_unknown

    def __truediv__(self, other: object) -> float:
        return 0.0

    def _reject_decision(self, *others: object) -> bool:
        decided = get_assumptions().find_decision()
        if decided is None:
            raise reject_values("a decision on tensor.item()", f"take it outside the step, or state it: {ITEM}")
        return decided

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _reject_decision
    __hash__ = int.__hash__


def reject_unknown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Rejects a call of torch that would use an unknown number, be it as a size, an index or an operand."""
    if any(type(value) is UnknownInt for value in tree_iter((args, kwargs))):
        raise reject_values("tensor.item() as a size or an argument", _REMEDY)

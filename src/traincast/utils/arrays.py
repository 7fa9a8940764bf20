"""The array types that every package speaks in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.intp]
"""Positions, as numpy's own sorts and searches give them."""


def group_positions(keys: IntArray | Int32Array) -> Iterator[tuple[int, IntArray]]:
    """Every key with the places where it stands, both in order; in one pass, however many keys there are.

    >>> [(key, places.tolist()) for key, places in grouped(np.array([7, 3, 7]))]
    [(3, [1]), (7, [0, 2])]
    """
    order = np.argsort(keys, kind="stable")
    numbers, first = np.unique(keys[order], return_index=True)
    if len(numbers):
        yield from zip(numbers.tolist(), np.split(order, first[1:]), strict=True)

"""Zipf's law over any number of rows, in a few hundred classes."""

from __future__ import annotations

import numpy as np

from traincast.arrays import FloatArray
from traincast.embeddings.classes import RowClasses

_SINGLE = 256  # ranks that are a class of their own
_RATIO = 1.02  # last rank over first of the other classes


def zipf_classes(rows: int, exponent: float) -> RowClasses:
    """Classes of a table whose r-th most popular row is wanted in proportion to r ** -exponent."""
    edges = _edges(rows)
    weight = _power_sums(edges, exponent)
    count = np.diff(edges)
    return RowClasses.of(count, weight / count)


def _edges(rows: int) -> FloatArray:
    """First ranks of the classes, and one past the last."""
    single = np.arange(1, min(rows, _SINGLE) + 1)
    if rows <= _SINGLE:
        return np.asarray(np.append(single, rows + 1), dtype=np.float64)
    steps = int(np.ceil(np.log(rows / _SINGLE) / np.log(_RATIO))) + 1
    further = np.unique(np.round(np.geomspace(_SINGLE + 1, rows + 1, steps + 1)))
    return np.concatenate([single, further])


def _power_sums(edges: FloatArray, exponent: float) -> FloatArray:
    """Sum of r ** -exponent over the ranks of each class: single ranks exactly, else by the integral."""
    first, last = edges[:-1] - 0.5, edges[1:] - 0.5
    slope = 1.0 - exponent
    growth = np.log(last / first)
    integral = growth if slope == 0.0 else np.expm1(slope * growth) / slope
    single = np.diff(edges) == 1.0
    return np.asarray(np.where(single, edges[:-1] ** -exponent, first**slope * integral))

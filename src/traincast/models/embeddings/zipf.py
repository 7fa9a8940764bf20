"""Zipf's law and its relatives over any number of rows, in a few hundred classes."""

from __future__ import annotations

import numpy as np

from traincast.models.embeddings.classes import RowClasses
from traincast.utils.arrays import FloatArray

_SINGLE = 256  # ranks that are a class of their own
_RATIO = 1.02  # last rank over first of the other classes


def make_zipf_classes(rows: int, exponent: float) -> RowClasses:
    """Classes of a table whose r-th most popular row is accessed in proportion to r ** -exponent."""
    edges = _choose_edges(rows)
    weight = _compute_power_sums(edges, exponent)
    count = np.diff(edges)
    return RowClasses.from_weights(count, weight / count)


def make_power_classes(rows: int, exponent: float) -> RowClasses:
    """Classes of a table whose row r is accessed as often as x ** -exponent, x from 1 to `rows` + 1, rounds down to
    r."""
    edges = _choose_edges(rows)
    count = np.diff(edges)
    return RowClasses.from_weights(count, _integrate_power(edges[:-1], edges[1:], exponent) / count)


def make_folded_classes(rows: int, exponent: float) -> RowClasses:
    """Classes of a table whose row r is accessed as r, r + `rows`, r + 2 `rows`... of a Zipf law without an end.

    What is beyond the first `rows` hardly differs between them: they share it evenly.
    """
    edges = _choose_edges(rows)
    weight, count = _compute_power_sums(edges, exponent), np.diff(edges)
    beyond = (rows + 0.5) ** (1.0 - exponent) / (exponent - 1.0)
    return RowClasses.from_weights(count, weight / count + beyond / rows)


def _choose_edges(rows: int) -> FloatArray:
    """First ranks of the classes, and one past the last."""
    single = np.arange(1, min(rows, _SINGLE) + 1)
    if rows <= _SINGLE:
        return np.asarray(np.append(single, rows + 1), dtype=np.float64)
    steps = int(np.ceil(np.log(rows / _SINGLE) / np.log(_RATIO))) + 1
    further = np.unique(np.round(np.geomspace(_SINGLE + 1, rows + 1, steps + 1)))
    return np.concatenate([single, further])


def _compute_power_sums(edges: FloatArray, exponent: float) -> FloatArray:
    """Sum of r ** -exponent over the ranks of each class: single ranks exactly, else by the integral."""
    single = np.diff(edges) == 1.0
    between = _integrate_power(edges[:-1] - 0.5, edges[1:] - 0.5, exponent)
    return np.asarray(np.where(single, edges[:-1] ** -exponent, between))


def _integrate_power(first: FloatArray, last: FloatArray, exponent: float) -> FloatArray:
    """Of x ** -exponent."""
    slope = 1.0 - exponent
    growth = np.log(last / first)
    return np.asarray(first**slope * (growth if slope == 0.0 else np.expm1(slope * growth) / slope))

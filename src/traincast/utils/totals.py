"""Sums by name, which every breakdown is made of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def sum_by_key(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """What is said of each key together, the largest first; of equal ones the first that was named.

    >>> totals([("gemm", 1.0), ("copy", 5.0), ("gemm", 2.0)])
    {'copy': 5.0, 'gemm': 3.0}
    """
    sums: dict[Key, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))

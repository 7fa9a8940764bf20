"""Node pairs that run slower than the rest of their cluster: named, and kept out of the curves."""

from __future__ import annotations

from typing import Any

import numpy as np

from traincast_evaluation.fitting.collectives_data import Points

SLOW = 1.15  # times slower than the healthy quarter; healthy pairs differ by a few percent


def find_slow_pairs(points: Points) -> dict[str, list[dict[str, Any]]]:
    """By set: pairs whose median time over sizes exceeds the cluster's lower quartile by 15 % or more."""
    entries: dict[str, list[dict[str, Any]]] = {}
    paired = points.take(points.pair != "")
    groups = sorted(set(zip(paired.set, paired.kind, paired.ranks, strict=True)))
    for name, kind, ranks in groups:
        group = paired.take((paired.set == name) & (paired.kind == kind) & (paired.ranks == ranks))
        ratio = group.seconds / _compute_healthy_times(group)
        for pair in np.unique(group.pair.astype(str)):
            slowdown = float(np.median(ratio[group.pair == pair]))
            if slowdown > SLOW:
                entry = {"pair": str(pair), "kind": str(kind), "ranks": int(ranks), "slowdown": round(slowdown, 3)}
                entries.setdefault(str(name), []).append(entry)
    return entries


def is_slow(points: Points, slow: dict[str, list[dict[str, Any]]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which points belong to a slow pair."""
    names = {(name, e["kind"], e["ranks"], e["pair"]) for name, entries in slow.items() for e in entries}
    rows = zip(points.set, points.kind, points.ranks, points.pair, strict=True)
    return np.array([(n, k, int(r), p) in names for n, k, r, p in rows], dtype=bool)


def drop_slow_pairs(points: Points, slow: dict[str, list[dict[str, Any]]]) -> Points:
    """The points that belong to no slow pair."""
    return points.take(~is_slow(points, slow))


def _compute_healthy_times(group: Points) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Lower quartile over pairs of the time at each point's size."""
    sizes, inverse = np.unique(group.bytes, return_inverse=True)
    quartile = np.array([np.quantile(group.seconds[group.bytes == size], 0.25) for size in sizes])
    return np.asarray(quartile[inverse])

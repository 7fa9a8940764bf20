"""Gradient boosting with symmetric trees: how the trees of `costs.kernels.conv.residual` are grown."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.conv.model import Boosting
from traincast.utils.arrays import FloatArray

_BINS = 64  # values told apart per feature; 128 are no better (docs/evidence/kernels.md)
_KNEE = 0.15  # log error beyond which one row pulls no harder; 0.08 is no better (docs/evidence/kernels.md)
_SHRINK_ROWS = 3.0  # a leaf with this weight of rows moves half way to their mean
_ROW_SHARE = 0.6  # of the rows, drawn anew for every tree
_FEATURE_SHARE = 0.5  # drawn anew for every tree; a quarter is no better (docs/evidence/kernels.md)


def boost(
    features: FloatArray,
    target: FloatArray,
    weight: FloatArray,
    *,
    trees: int = 700,
    depth: int = 6,
    rate: float = 0.065,
) -> Boosting:
    """Trees that together approach `target`; errors beyond `_KNEE` pull no harder (Huber).

    Every tree sees some of the rows and features, drawn with a fixed seed: same data, same trees.
    """
    single = features.astype(np.float32)
    places = np.linspace(0, 1, _BINS + 1)[1:-1]
    edges = [np.unique(np.quantile(column, places).astype(np.float32)) for column in single.T]
    binned = np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, single.T, strict=True)])
    random = np.random.default_rng(0)
    mass = weight / weight.mean()
    rest = target.astype(np.float64).copy()
    chosen, cuts, leaves = [], [], []
    for _ in range(trees):
        rows = np.sort(random.permutation(len(rest))[: max(1, int(_ROW_SHARE * len(rest)))])
        some = np.sort(random.permutation(len(binned))[: max(1, round(_FEATURE_SHARE * len(binned)))])
        tree, leaf = _tree(
            binned[np.ix_(some, rows)], np.clip(rest[rows], -_KNEE, _KNEE) * mass[rows], mass[rows], depth
        )
        index = np.zeros(len(rest), dtype=np.int64)
        for column, place in tree:
            index = 2 * index + (binned[some[column]] > place)
        leaves.append(rate * leaf)
        rest -= leaves[-1][index]
        chosen.append([int(some[column]) for column, _ in tree])
        cuts.append([edges[some[c]][place] if place < len(edges[some[c]]) else np.inf for c, place in tree])
    kept = np.array(leaves).astype(np.float32).astype(np.float64)
    return Boosting(np.array(chosen, dtype=np.int64), np.array(cuts, dtype=np.float32), kept)


def _tree(
    binned: npt.NDArray[np.int64], pull: FloatArray, mass: FloatArray, depth: int
) -> tuple[list[tuple[int, int]], FloatArray]:
    """(feature, bin) of every level, and what the leaves move to."""
    index = np.zeros(len(pull), dtype=np.int64)
    levels = []
    for level in range(depth):
        column, place = _best_split(binned, index, 1 << level, pull, mass)
        index = 2 * index + (binned[column] > place)
        levels.append((column, place))
    total, weight = (np.bincount(index, part, 1 << depth) for part in (pull, mass))
    return levels, total / (weight + _SHRINK_ROWS)


def _best_split(
    binned: npt.NDArray[np.int64], index: npt.NDArray[np.int64], nodes: int, pull: FloatArray, mass: FloatArray
) -> tuple[int, int]:
    """The feature and bin that, split in every node at once, explain most."""
    best, result = -1.0, (0, 0)
    for column, bins in enumerate(binned):
        slot = index * _BINS + bins
        pulls = np.cumsum(np.bincount(slot, pull, nodes * _BINS).reshape(nodes, _BINS), axis=1)
        masses = np.cumsum(np.bincount(slot, mass, nodes * _BINS).reshape(nodes, _BINS), axis=1)
        right_pull, right_mass = pulls[:, -1:] - pulls, masses[:, -1:] - masses
        gain = (pulls**2 / (masses + _SHRINK_ROWS) + right_pull**2 / (right_mass + _SHRINK_ROWS)).sum(axis=0)[:-1]
        place = int(np.argmax(gain))
        if gain[place] > best * (1 + 1e-12):
            best, result = float(gain[place]), (column, place)
    return result

"""Gradient boosting with symmetric trees, small enough to keep as arrays and fast enough to ask a million times.

Every node of one level tests the same feature against the same threshold, so that a row's leaf is a number made of a
few comparisons. Beyond the data a tree is constant: what it corrects keeps the trend of the physics below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.kernels.call import FloatArray

_BINS = 32
_CHUNK = 8192
_KNEE = 0.1
_SHRINK_ROWS = 20.0  # a leaf with this weight of rows moves half way to their mean


@dataclass(frozen=True, slots=True)
class Boosting:
    """Trees as arrays: `feature` and `threshold` are [trees, depth], `leaf` is [trees, 2**depth]."""

    feature: npt.NDArray[np.int64]
    threshold: FloatArray
    leaf: FloatArray

    def predict(self, features: FloatArray) -> FloatArray:
        """The sum of all trees for every row, in pieces that stay in cache."""
        total = np.zeros(len(features))
        for start in range(0, len(features), _CHUNK):
            columns = np.ascontiguousarray(features[start : start + _CHUNK].T)
            part = total[start : start + _CHUNK]
            for features_of, thresholds, leaves in zip(self.feature, self.threshold, self.leaf, strict=True):
                index = np.zeros(len(part), dtype=np.uint8)  # depth is at most 8
                for column, threshold in zip(features_of, thresholds, strict=True):
                    index += index
                    index += columns[column] > threshold
                part += leaves.take(index)
        return total

    def state(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """As arrays, single precision: leaves are corrections of a few percent."""
        return {
            f"{prefix}_feature": self.feature.astype(np.int16),
            f"{prefix}_threshold": self.threshold,
            f"{prefix}_leaf": self.leaf.astype(np.float32),
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]], prefix: str) -> Boosting:
        """Read back from arrays."""
        return Boosting(
            state[f"{prefix}_feature"].astype(np.int64),
            state[f"{prefix}_threshold"].astype(np.float64),
            state[f"{prefix}_leaf"].astype(np.float64),
        )


def boost(
    features: FloatArray, target: FloatArray, weight: FloatArray, *, trees: int = 300, depth: int = 6, rate: float = 0.2
) -> Boosting:
    """Trees that together approach `target`; errors beyond `_KNEE` pull no harder (Huber). Deterministic."""
    edges = [np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 1)[1:-1])) for column in features.T]
    binned = np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, features.T, strict=True)])
    mass = weight / weight.mean()
    rest = target.astype(np.float64).copy()
    chosen, cuts, leaves = [], [], []
    for _ in range(trees):
        pull = np.clip(rest, -_KNEE, _KNEE) * mass
        index = np.zeros(len(rest), dtype=np.int64)
        tree: list[tuple[int, float]] = []
        for level in range(depth):
            column, place = _best_split(binned, index, 1 << level, pull, mass)
            cut = edges[column][place] if len(edges[column]) else np.inf
            index = 2 * index + (binned[column] > place)
            tree.append((column, float(cut)))
        total = np.bincount(index, pull, 1 << depth)
        leaf = rate * total / (np.bincount(index, mass, 1 << depth) + _SHRINK_ROWS)
        rest -= leaf[index]
        chosen.append([column for column, _ in tree])
        cuts.append([cut for _, cut in tree])
        leaves.append(leaf)
    kept = np.array(leaves).astype(np.float32).astype(np.float64)
    return Boosting(np.array(chosen, dtype=np.int64), np.array(cuts), kept)


def _best_split(
    binned: npt.NDArray[np.int64], index: npt.NDArray[np.int64], nodes: int, pull: FloatArray, mass: FloatArray
) -> tuple[int, int]:
    """The feature and bin that, split in every node at once, explain most."""
    best, answer = -1.0, (0, 0)
    for column, bins in enumerate(binned):
        slot = index * _BINS + bins
        pulls = np.cumsum(np.bincount(slot, pull, nodes * _BINS).reshape(nodes, _BINS), axis=1)
        masses = np.cumsum(np.bincount(slot, mass, nodes * _BINS).reshape(nodes, _BINS), axis=1)
        right_pull, right_mass = pulls[:, -1:] - pulls, masses[:, -1:] - masses
        gain = (pulls**2 / (masses + _SHRINK_ROWS) + right_pull**2 / (right_mass + _SHRINK_ROWS)).sum(axis=0)[:-1]
        place = int(np.argmax(gain))
        if gain[place] > best * (1 + 1e-12):
            best, answer = float(gain[place]), (column, place)
    return answer

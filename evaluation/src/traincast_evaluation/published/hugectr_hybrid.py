"""HugeCTR's hybrid embedding (MLPerf 1.0 to 2.1): rows that many samples want are on every GPU, the others on one.

Which rows are frequent is its own rule (`calculate_threshold`): on one node those that a GPU's samples want twice with
more than a small probability; on several those for which an all-reduce moves less than an all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from traincast.models.embeddings import Table
from traincast.models.embeddings.access import make_row_classes
from traincast_evaluation.published.run import Run

_DUPLICATES = 0.03  # on one node: the most that a row may be wanted twice by one GPU's samples (HybridEmbeddingParam)
# on several nodes: bandwidths of all-reduce and all-to-all, and their ratio's efficiency (HybridEmbeddingParam)
_ALL_REDUCE = 1.3e11
_ALL_TO_ALL = 23.75e9  # as configured from MLPerf 1.1 on
_DEFAULT_ALL_TO_ALL = 1.9e11  # the library's default, with which MLPerf 1.0 was run
_EFFICIENCY = {14: 0.5}  # by nodes, as configured; else 1.0, the library's default and what 4 and 8 nodes were run with


@dataclass(frozen=True, slots=True)
class HybridRows:
    """What a step's lookups are: `frequent` rows that all GPUs have, `touched` of them by the samples of one GPU, and
    the share of lookups that want others."""

    frequent: int
    touched: int
    infrequent_share: float


def compute_frequent_count(run: Run, *, by_default: bool = False) -> float:
    """How often a step's samples must want a row that is to be on every GPU; `by_default`: with the library's
    bandwidths and efficiency instead of the configured ones."""
    nodes = -(-run.gpus // run.gpus_per_node)
    if nodes == 1:
        local = run.global_batch / run.gpus
        return run.global_batch * sqrt(2.0 * _DUPLICATES / (local * max(local - 1.0, 1.0)))
    ratio = _DEFAULT_ALL_TO_ALL if by_default else _ALL_TO_ALL * _EFFICIENCY.get(nodes, 1.0)
    return nodes * ratio / _ALL_REDUCE * nodes / (nodes - 1.0)


def count_hybrid_rows(tables: Sequence[Table], run: Run, *, by_default: bool = False) -> HybridRows:
    """Frequent rows of these tables, and who wants them; `by_default` as for `frequent_count`."""
    least, local = compute_frequent_count(run, by_default=by_default), run.global_batch // run.gpus
    frequent = touched = others = lookups = 0.0
    for table in tables:
        classes = make_row_classes(table.access, table.rows)
        often = classes.probability * table.count_lookups(run.global_batch) >= least
        rows, probability = classes.rows[often], classes.probability[often]
        frequent += float(rows.sum())
        touched += float(rows @ -np.expm1(table.count_lookups(local) * np.log1p(-np.minimum(probability, 1 - 1e-15))))
        others += table.count_lookups(local) * (1.0 - float(rows @ probability))
        lookups += table.count_lookups(local)
    return HybridRows(round(frequent), round(touched), others / lookups)

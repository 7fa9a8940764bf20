"""Rows drawn from an access distribution: what a real lookup is given where its traffic is only described."""

from __future__ import annotations

from math import gcd

import numpy as np

from traincast.models.embeddings.access import Access, make_row_classes
from traincast.utils.arrays import IntArray

_SCATTER = 0x9E3779B1  # Knuth's multiplicative hash: neighbours in popularity are no neighbours in memory


def draw_rows(access: Access, rows: int, lookups: int, random: np.random.Generator) -> IntArray:
    """Row numbers (int64[lookups]) of a table of `rows`; popular rows are scattered over the table."""
    classes = make_row_classes(access, rows)
    chosen = random.choice(len(classes.rows), size=lookups, p=classes.rows * classes.probability)
    first = np.concatenate([[0.0], np.cumsum(classes.rows)[:-1]])
    rank = np.floor(first[chosen] + random.random(lookups) * classes.rows[chosen]).astype(np.int64)
    stride = _SCATTER % rows if rows > 1 else 1
    while gcd(stride, rows) != 1:
        stride += 1
    return np.asarray(np.minimum(rank, rows - 1) * stride % rows)

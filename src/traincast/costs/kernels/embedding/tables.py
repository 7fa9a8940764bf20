"""What a kernel over embedding tables touches for a batch: how often rows repeat follows from who accesses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.models.embeddings.access import Access, Uniform
from traincast.models.embeddings.load import FIELDS as LOAD_FIELDS
from traincast.models.embeddings.load import compute_table_load

_LOOKUPS, _DISTINCT = LOAD_FIELDS.index("lookups"), LOAD_FIELDS.index("distinct_rows")


@dataclass(frozen=True, slots=True)
class Tables:
    """What a lookup touches: `load` in the order of `embeddings.load.FIELDS`, `rows` of all tables together.

    `ascending` says that the indices of every bag are sorted; `host` that the rows are in host memory (1), or only
    their optimizer state (2).
    """

    batch: int
    load: tuple[float, ...]
    rows: float
    longest_bag: float
    index_bytes: int
    row_item_bytes: int
    weighted: bool = False
    ascending: bool = False
    host: int = 0

    @property
    def lookups(self) -> int:
        """Lookups over all tables and samples."""
        return round(self.load[_LOOKUPS])

    @property
    def distinct(self) -> float:
        """Different rows over all tables."""
        return self.load[_DISTINCT]

    def call(self, kind: str, compute: str = "fp32") -> KernelCall:
        """The embedding kernel of this kind over these tables."""
        sizes: dict[str, float] = dict(zip(LOAD_FIELDS, self.load, strict=True))
        sizes |= {
            "batch": self.batch,
            "longest_bag": self.longest_bag,
            "index_bytes": self.index_bytes,
            "row_item_bytes": self.row_item_bytes,
            "weighted": int(self.weighted),
            "sorted": int(self.ascending),
            "host": self.host,
        }
        return EMBEDDING.call(kind, compute, estimated=False, **sizes)


def make_uniform_tables(
    *,
    batch: int,
    lookups: int,
    rows: Sequence[float],
    dims: Sequence[float],
    index_bytes: int,
    row_item_bytes: int,
    weighted: bool = False,
    ascending: bool = False,
) -> Tables:
    """Tables of these row counts and dims, each with an equal part of the lookups, which want all its rows alike."""
    pooling = lookups / max(1, batch * len(rows))
    return make_pooled_tables(
        batch=batch,
        pooling=(pooling,) * len(rows),
        access=(Uniform(),) * len(rows),
        rows=rows,
        dims=dims,
        index_bytes=index_bytes,
        row_item_bytes=row_item_bytes,
        weighted=weighted,
        ascending=ascending,
    )


def make_pooled_tables(
    *,
    batch: int,
    pooling: Sequence[float],
    access: Sequence[Access],
    rows: Sequence[float],
    dims: Sequence[float],
    index_bytes: int,
    row_item_bytes: int,
    weighted: bool = False,
    ascending: bool = False,
) -> Tables:
    """Tables of these row counts and dims, each with its lookups per sample and the rows that those want."""
    load = np.zeros(len(LOAD_FIELDS))
    for kind, height, length, dim in zip(access, rows, pooling, dims, strict=True):
        load += compute_table_load(kind, max(1, round(height)), batch * length, dim, row_item_bytes)
    return Tables(
        batch=batch,
        load=tuple(load.tolist()),
        rows=sum(rows),
        longest_bag=max(pooling),
        index_bytes=index_bytes,
        row_item_bytes=row_item_bytes,
        weighted=weighted,
        ascending=ascending,
    )


def make_fill_call(lookups: float, fetched_bytes: float) -> KernelCall:
    """The kernels that search FBGEMM's cache for the rows of these lookups and bring those it lacks."""
    sizes = dict.fromkeys(EMBEDDING.fields, 0.0) | {"lookups": float(lookups), "row_bytes": float(fetched_bytes)}
    return EMBEDDING.call("cache_fill", "fp32", estimated=False, **sizes)


def guess_longest_bag(batch: int, tables: int, lookups: float) -> float:
    """Lookups of the longest bag where only the mean is known: lengths are taken to fall off exponentially.

    The longest of n is then the mean times the n-th harmonic number. Where every sample makes the same number of
    lookups, no bag has more than that number.
    """
    bags = max(1, batch * tables)
    mean = lookups / bags
    if mean <= 1.0:
        return float(mean > 0)
    longest = mean * (log(bags) + np.euler_gamma)
    per_sample = lookups / max(1, batch)
    return float(min(longest, per_sample)) if per_sample == round(per_sample) else float(longest)

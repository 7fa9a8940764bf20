"""Kernel calls of described tables, as a test asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, expm1, log1p

from traincast.costs.kernels.embedding.lowering.lookups import lower_tbe_preparation
from traincast.costs.kernels.embedding.physics import Tables
from traincast.models.embeddings.table import ITEM_BYTES, Part, Table, find_longest_bag, total_load


def distinct_rows(rows: float, lookups: float) -> float:
    """Expected number of different rows among `lookups` uniform draws from a table of `rows`."""
    return -rows * expm1(lookups * log1p(-1.0 / rows))


def lookup_tables(tables: Sequence[Table], batch: int, *, index_bytes: int = 8, ascending: bool = False) -> Tables:
    """What one kernel over these tables, alike in dtype and weights, touches for a batch."""
    parts = [Part(table, table.dim) for table in tables]
    return Tables(
        batch=batch,
        load=tuple(total_load(parts, batch).tolist()),
        rows=sum(table.rows for table in tables),
        longest_bag=ceil(find_longest_bag(parts)),
        index_bytes=index_bytes,
        row_item_bytes=ITEM_BYTES[tables[0].dtype],
        weighted=tables[0].weighted,
        ascending=ascending,
    )


def tbe_forward_calls(tables: Sequence[Table], batch: int):
    """FBGEMM's lookup of a group of tables: one kernel."""
    return (lookup_tables(tables, batch).call("tbe_forward", tables[0].dtype),)


def tbe_backward_calls(tables: Sequence[Table], batch: int):
    """FBGEMM's backward of a group of tables, their optimizer fused into it."""
    grouped = lookup_tables(tables, batch)
    return (*lower_tbe_preparation(grouped), grouped.call(f"tbe_backward_{tables[0].optimizer}", tables[0].dtype))

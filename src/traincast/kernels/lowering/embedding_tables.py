"""Kernel calls for described tables: how often their rows repeat comes from their access distributions."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from traincast.embeddings.load import Part, longest_bag, total_load
from traincast.embeddings.table import ITEM_BYTES, Table
from traincast.errors import TraincastError
from traincast.kernels.call import KernelCall
from traincast.kernels.lowering.embedding import Tables
from traincast.kernels.lowering.embedding_tbe import tbe_preparation
from traincast.kernels.registry import Item


def lookup_tables(tables: Sequence[Table], batch: int, *, index_bytes: int = 8, ascending: bool = False) -> Tables:
    """What one kernel over these tables touches for a batch of `batch` samples.

    They must share a dtype and be all weighted or all not: one kernel reads them. `ascending` says that the indices of
    every bag are sorted.
    """
    first = tables[0]
    for table in tables:
        if (table.dtype, table.weighted) != (first.dtype, first.weighted):
            raise TraincastError(
                f"tables '{first.name}' and '{table.name}' differ in dtype or weights; one kernel needs them equal"
            )
    parts = [Part(table, table.dim) for table in tables]
    return Tables(
        batch=batch,
        load=tuple(total_load(parts, batch).tolist()),
        rows=sum(table.rows for table in tables),
        longest_bag=ceil(longest_bag(parts)),
        index_bytes=index_bytes,
        row_item_bytes=ITEM_BYTES[first.dtype],
        weighted=first.weighted,
        ascending=ascending,
    )


def tbe_forward_calls(tables: Sequence[Table], batch: int) -> tuple[KernelCall, ...]:
    """FBGEMM's lookup of a group of tables: one kernel."""
    return (lookup_tables(tables, batch).call("tbe_forward", tables[0].dtype),)


def tbe_backward_calls(tables: Sequence[Table], batch: int) -> tuple[Item, ...]:
    """FBGEMM's backward of a group of tables, their optimizer fused into it."""
    optimizer = tables[0].optimizer
    for table in tables:
        if table.optimizer != optimizer or optimizer == "none":
            raise TraincastError(
                f"table '{table.name}' has optimizer '{table.optimizer}'; the tables of one backward kernel need "
                "the same, and not 'none'"
            )
    grouped = lookup_tables(tables, batch)
    return (*tbe_preparation(grouped), grouped.call(f"tbe_backward_{optimizer}", tables[0].dtype))

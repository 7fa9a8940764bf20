"""Bytes of a batch's lookups and updates by the memory level that serves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from traincast.models.embeddings.table import Table
from traincast.utils.errors import TraincastError

SECTOR_BYTES = 32  # what a GPU's memory moves at the least


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """A level with room for `capacity_bytes` of this table. One that is `kept` holds its rows from batch to batch."""

    name: str
    capacity_bytes: float
    kept: bool = False

    def __post_init__(self) -> None:
        if not self.capacity_bytes >= 0:
            raise TraincastError(f"memory level '{self.name}': {self.capacity_bytes:g} bytes; give 0 or more")


@dataclass(frozen=True, slots=True)
class LevelBytes:
    """What a level serves for one batch: row bytes read by the lookups, and read plus written by the update."""

    name: str
    lookup_bytes: float
    update_bytes: float


def compute_bytes_by_level(table: Table, batch: int, levels: Sequence[MemoryLevel]) -> tuple[LevelBytes, ...]:
    """Bytes that each level serves, nearest level first; the last must hold the whole table.

    Levels are least-recently-used and each includes the one before. Rows come in whole 32-byte sectors. The update
    touches every different row of the batch once, with its optimizer state, where the lookups left it.
    """
    row = SECTOR_BYTES * ceil(table.row_bytes / SECTOR_BYTES)
    state = SECTOR_BYTES * ceil(table.state_row_bytes / SECTOR_BYTES)
    if not levels or levels[-1].capacity_bytes < table.memory_bytes:
        raise TraincastError(
            f"table '{table.name}': {table.memory_bytes / 1e9:.3g} GB do not fit the last memory level; "
            "end with one that holds them"
        )
    lookups, unique = table.count_lookups(batch), table.count_unique_rows(batch)
    served, updated, parts = 0.0, 0.0, []
    for level in levels:
        last = level is levels[-1]
        capacity = level.capacity_bytes / row
        share = 1.0 if last else max(served, table.compute_hit_rate(capacity, None if level.kept else batch))
        here = unique if last else min(unique, max(updated, capacity))
        parts.append(LevelBytes(level.name, (share - served) * lookups * row, 2.0 * (here - updated) * (row + state)))
        served, updated = share, here
    return tuple(parts)

"""Where NVIDIA-Merlin/distributed-embeddings puts tables: column slices of large ones, dealt out by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from traincast.models.embeddings import Pooling, Table, Zipf

SLICE_ELEMENTS = 1280 << 20
"""Elements above which a table is cut into column slices: `--column_slice_threshold` of the published command."""
SKEW = 1.05


@dataclass(frozen=True, slots=True)
class EqualTables:
    """Equal tables: `hotness` are the lookups per sample of the inputs that read each of them."""

    tables: int
    rows: int
    dim: int
    hotness: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Columns of one table on one rank."""

    table: int
    rows: int
    dim: int
    hotness: tuple[int, ...]

    def inputs(self) -> list[Table]:
        """A table for each input that reads the slice."""
        return [make_input_table(self.rows, self.dim, lookups) for lookups in self.hotness]


def make_input_table(rows: int, dim: int, lookups: float) -> Table:
    """A table as one input reads it: this many lookups per sample. Those of equal sizes are equal."""
    return Table(name=f"{rows} x {dim}", rows=rows, dim=dim, pooling=Pooling.from_constant(lookups), access=Zipf(SKEW))


def place_slices(groups: Sequence[EqualTables], gpus: int) -> list[list[Slice]]:
    """The slices of each rank ("memory_balanced"): sorted by size and dealt out forth and back."""
    whole = [Slice(0, group.rows, group.dim, group.hotness) for group in groups for _ in range(group.tables)]
    slices = [part for number, table in enumerate(whole) for part in _cut_slices(replace(table, table=number), gpus)]
    slices.sort(key=lambda part: (part.rows * part.dim, part.table), reverse=True)
    return [[*slices[rank :: 2 * gpus], *slices[2 * gpus - 1 - rank :: 2 * gpus]] for rank in range(gpus)]


def _cut_slices(table: Slice, gpus: int) -> list[Slice]:
    count, elements = 1, table.rows * table.dim
    while elements > SLICE_ELEMENTS:
        count, elements = 2 * count, elements // 2
    count = min(count, gpus, table.dim)
    width, wider = divmod(table.dim, count)
    return [replace(table, dim=width + (number < wider)) for number in range(count)]

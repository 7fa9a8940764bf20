"""Groups of tables that one kernel looks up: device time of lookup and update from sums over shards, and the sort
before an update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from traincast.costs.host.profile import BETWEEN, HostProfile
from traincast.costs.kernels.contract import COMPUTE_TYPES, Calls, KernelCall
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.lowering.lookups import lower_tbe_preparation
from traincast.costs.kernels.embedding.physics import Tables, make_fill_call
from traincast.costs.kernels.streaming.lowering.index import RADIX_BITS, SINGLE_TILE
from traincast.hardware.device import Device
from traincast.models.embeddings.table import (
    FIELDS,
    ITEM_BYTES,
    Part,
    Table,
    compute_part_load,
    count_fetched_rows,
    find_longest_bag,
)
from traincast.models.placement.memory import INDEX_BYTES
from traincast.models.placement.options import Option
from traincast.models.placement.plan import ComputeKernel, ShardingKind
from traincast.utils.arrays import FloatArray, IntArray

TERMS = (*FIELDS, "bag", "elements", "rows", "fetched")
"""What shards of a group add up: their load, lengths of bags (see `BAG_POWER`), weights, rows, and bytes that a batch
brings from the host into a cache on the device."""
BAG_POWER = 16.0
"""The longest bag of several shards is not a sum; the 16th root of the sum of 16th powers is nearly the longest."""
TABLES, LOOKUPS, DISTINCT, COLUMNS = (FIELDS.index(n) for n in ("tables", "lookups", "distinct_rows", "columns"))
BAG, ELEMENTS, ROWS, FETCHED = (TERMS.index(name) for name in ("bag", "elements", "rows", "fetched"))
_COPY_GRID = np.concatenate([[1.0], 2.0 ** np.arange(6.0, 40.0, 0.25)])  # bytes


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Tables that share a kernel: those of one kind of sharding and of one form."""

    kind: ShardingKind
    kernel: ComputeKernel
    dtype: str
    weighted: bool
    optimizer: str

    @staticmethod
    def of(table: Table, option: Option) -> TableGroup:
        """The group of a table under an option."""
        return TableGroup(option.kind, option.kernel, table.dtype, table.weighted, table.optimizer)

    @property
    def order(self) -> tuple[object, ...]:
        """Groups are numbered in this order: that in which a step looks them up."""
        return self.kind.position, self.kernel, self.dtype, self.weighted, self.optimizer

    @property
    def copied(self) -> bool:
        """Whether every rank has these tables whole, for its own samples."""
        return self.kind.copied


def compute_shard_terms(
    table: Table, option: Option, world_size: int, gpus_per_node: int, batch_size: int
) -> FloatArray:
    """Terms of one shard of a table under an option; `batch_size` samples per rank."""
    height, columns = option.shard_shape(table, world_size, gpus_per_node)
    samples = option.kind.count_samples(batch_size, world_size)
    part = Part(table, columns, height / table.rows)
    fetched = 0.0
    if option.kernel.cached:
        fetched = count_fetched_rows(part, samples, option.cache_fraction) * columns * ITEM_BYTES[table.dtype]
    rest = (find_longest_bag([part]) ** BAG_POWER, height * columns, height, fetched)
    return np.concatenate([compute_part_load(part, samples), rest])


class LookupKernels:
    """The lookup and update kernels of all groups on one device."""

    def __init__(self, groups: Sequence[TableGroup], device: Device, *, batch_size: int, world_size: int) -> None:
        self.device = device
        updates = ["dense" if group.copied else group.optimizer for group in groups]
        self._forward = np.full(len(groups), EMBEDDING.kinds.index("tbe_forward"))
        self._backward = np.array([EMBEDDING.kinds.index(f"tbe_backward_{update}") for update in updates])
        self._compute = np.array([COMPUTE_TYPES.index(group.dtype) for group in groups])
        self._samples = np.array([group.kind.count_samples(batch_size, world_size) for group in groups], dtype=float)
        constant = [
            (INDEX_BYTES, ITEM_BYTES[group.dtype], group.weighted, 0, group.kernel.host_access) for group in groups
        ]
        self._constant = np.array(constant, dtype=float)

    def seconds(self, sums: FloatArray, group: IntArray) -> tuple[FloatArray, FloatArray]:
        """Seconds of lookup and update for sums [n, TERMS] of these groups; zero where there is no table."""
        forward, backward = np.zeros(len(sums)), np.zeros(len(sums))
        used = np.flatnonzero(sums[:, TABLES] > 0.5)
        if len(used):
            held, which = sums[used], group[used]
            bag = np.ceil(np.maximum(held[:, BAG], 0.0) ** (1.0 / BAG_POWER) - 1e-9)
            load = np.maximum(held[:, : len(FIELDS)], 0.0)
            values = np.column_stack([self._samples[which], load, bag, self._constant[which]])
            calls = Calls(
                EMBEDDING,
                np.concatenate([self._forward[which], self._backward[which]]),
                np.tile(self._compute[which], 2),
                np.concatenate([values, values]),
            )
            seconds = price_calls(calls, self.device)[0].seconds
            forward[used], backward[used] = seconds[: len(used)], seconds[len(used) :]
            forward[used] += self._time_fetches(held[:, FETCHED])
        return forward, backward

    def _time_fetches(self, nbytes: FloatArray) -> FloatArray:
        """Seconds of rows on their way from the host and back, beyond the search for them."""
        if not np.any(nbytes > 0.5):
            return np.zeros(len(nbytes))
        return np.asarray(np.interp(nbytes, _COPY_GRID, self._copies - self._copies[0]))

    @cached_property
    def _copies(self) -> FloatArray:
        calls = [make_fill_call(0.0, nbytes) for nbytes in _COPY_GRID.tolist()]
        return price_calls(Calls.of(EMBEDDING, calls), self.device)[0].seconds


_GRID = 2.0 ** np.arange(6.0, 34.5, 0.5)  # lookups: from fewer than one launch sorts to more than a device holds
_LOOKUPS = FIELDS.index("lookups")
_MOST_PASSES = 8  # a row number has eight bytes


class Preparation:
    """The launches before the update on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._curves: dict[tuple[int, bool], FloatArray] = {}
        self._more = [_count_more_launches(weighted) for weighted in (False, True)]

    def seconds(self, lookups: FloatArray, rows: FloatArray, *, weighted: bool) -> FloatArray:
        """Seconds for tables with this many lookups and rows: a pass over the lookups for each byte of a row number."""
        passes = _count_passes(rows)
        seconds = np.zeros(lookups.shape)
        for count in np.unique(passes).tolist():
            alike = passes == count
            seconds[alike] = np.interp(lookups[alike], _GRID, self._get_curve(count, weighted))
        return np.where(lookups > 0.5, seconds, 0.0)

    def host_seconds(
        self, lookups: FloatArray, rows: FloatArray, host: HostProfile, scope: str, *, weighted: bool
    ) -> FloatArray:
        """Seconds that the host takes for these launches under an op of this name, beyond those of few lookups."""
        kernels, memsets = self._more[weighted][:, np.minimum(_count_passes(rows), _MOST_PASSES)]
        between = float(host.scope_seconds([scope])[0, BETWEEN])
        seconds = kernels * (between + host.t4["launch"]) + memsets * (between + host.t4["memset"])
        return np.where(lookups > SINGLE_TILE, seconds, 0.0)

    def _get_curve(self, passes: int, weighted: bool) -> FloatArray:
        if (passes, weighted) not in self._curves:
            self._curves[passes, weighted] = _tabulate_seconds(passes, weighted, self.device)
        return self._curves[passes, weighted]


def _count_passes(rows: FloatArray) -> IntArray:
    bits = np.floor(np.log2(np.maximum(rows, 1.0))) + 1.0
    return np.ceil(bits / RADIX_BITS).astype(np.int64)


def _make_sort_tables(lookups: float, passes: int, weighted: bool) -> Tables:
    load = [0.0] * len(FIELDS)
    load[_LOOKUPS] = lookups
    return Tables(
        batch=1, load=tuple(load), rows=2.0 ** (RADIX_BITS * passes) - 1, longest_bag=1.0, index_bytes=8,
        row_item_bytes=4, weighted=weighted,
    )  # fmt: skip


def _count_launches(lookups: float, passes: int, weighted: bool) -> IntArray:
    """How many kernels and how many memsets are launched."""
    items = [
        item
        for item in lower_tbe_preparation(_make_sort_tables(lookups, passes, weighted))
        if isinstance(item, KernelCall)
    ]
    memsets = sum(item.kind == "memset" for item in items)
    return np.array([len(items) - memsets, memsets])


@cache
def _count_more_launches(weighted: bool) -> FloatArray:
    """Kernels and memsets that a sort of this many passes launches beyond one of a single tile: [2, passes]."""
    counts = [_count_launches(SINGLE_TILE + 1.0, passes, weighted) for passes in range(_MOST_PASSES + 1)]
    return np.array(counts, dtype=np.float64).T - _count_launches(1.0, 1, weighted)[:, None]


def _tabulate_seconds(passes: int, weighted: bool, device: Device) -> FloatArray:
    """Seconds at each number of lookups of the grid."""
    families: dict[str, list[tuple[int, KernelCall]]] = defaultdict(list)
    for point, lookups in enumerate(_GRID.tolist()):
        for item in lower_tbe_preparation(_make_sort_tables(lookups, passes, weighted)):
            if isinstance(item, KernelCall):
                families[item.family.name].append((point, item))
    total = np.zeros(len(_GRID))
    for entries in families.values():
        calls = Calls.of(entries[0][1].family, [call for _, call in entries])
        np.add.at(total, [point for point, _ in entries], price_calls(calls, device)[0].seconds)
    return total

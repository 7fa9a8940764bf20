"""What comes before an update: the sort of the lookups. Its device time, tabulated, and its launches."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import numpy as np

from traincast.costs.host.profile import BETWEEN, HostProfile
from traincast.costs.kernels.call import Calls, KernelCall
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.embedding.lowering.tbe import lower_tbe_preparation
from traincast.costs.kernels.embedding.tables import Tables
from traincast.costs.kernels.streaming.lowering.index import RADIX_BITS, SINGLE_TILE
from traincast.hardware.device import Device
from traincast.models.embeddings.load import FIELDS
from traincast.utils.arrays import FloatArray, IntArray

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

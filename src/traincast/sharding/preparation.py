"""Device time of what comes before an update: the sort of the lookups, tabulated over their number."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from traincast.embeddings.load import FIELDS
from traincast.kernels.call import Calls, FloatArray, KernelCall
from traincast.kernels.cost import price_calls
from traincast.kernels.lowering.embedding import Tables
from traincast.kernels.lowering.embedding_tbe import tbe_preparation
from traincast.platform.device import Device

_GRID = 2.0 ** np.arange(6.0, 34.5, 0.5)
_RADIX_BITS = 8
_LOOKUPS = FIELDS.index("lookups")


class Preparation:
    """The launches before the update on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._curves: dict[tuple[int, bool], FloatArray] = {}

    def seconds(self, lookups: FloatArray, rows: FloatArray, *, weighted: bool) -> FloatArray:
        """Seconds for tables with so many lookups and rows: a pass over the lookups for each byte of a row number."""
        bits = np.floor(np.log2(np.maximum(rows, 1.0))) + 1.0
        passes = np.ceil(bits / _RADIX_BITS).astype(np.int64)
        seconds = np.zeros(lookups.shape)
        for count in np.unique(passes).tolist():
            own = passes == count
            seconds[own] = np.interp(lookups[own], _GRID, self._curve(count, weighted))
        return np.where(lookups > 0.5, seconds, 0.0)

    def _curve(self, passes: int, weighted: bool) -> FloatArray:
        if (passes, weighted) not in self._curves:
            self._curves[passes, weighted] = _tabulated(passes, weighted, self.device)
        return self._curves[passes, weighted]


def _tabulated(passes: int, weighted: bool, device: Device) -> FloatArray:
    """Seconds at each number of lookups of the grid."""
    families: dict[str, list[tuple[int, KernelCall]]] = defaultdict(list)
    for point, lookups in enumerate(_GRID.tolist()):
        load = [0.0] * len(FIELDS)
        load[_LOOKUPS] = lookups
        tables = Tables(
            batch=1, load=tuple(load), rows=2.0 ** (_RADIX_BITS * passes) - 1, longest_bag=1.0, index_bytes=8,
            row_item_bytes=4, weighted=weighted,
        )  # fmt: skip
        for item in tbe_preparation(tables):
            if isinstance(item, KernelCall):
                families[item.family.name].append((point, item))
    total = np.zeros(len(_GRID))
    for entries in families.values():
        calls = Calls.of(entries[0][1].family, [call for _, call in entries])
        np.add.at(total, [point for point, _ in entries], price_calls(calls, device)[0].seconds)
    return total

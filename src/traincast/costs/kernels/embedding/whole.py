"""Whole lookups and updates as public benchmarks time them: several launches, and what the stopwatch adds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from traincast.costs.kernels.call import Calls, KernelCall
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.traffic import Rates, embedding_seconds
from traincast.costs.kernels.embedding.watches import Watches
from traincast.costs.kernels.registry import Control, Item
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

HELD_OUT_SHARE = 1 / 3
"""Of the configurations of the public lookup tables: what no fit may see. They are few, so more than a fifth."""
_SEED = "embedding_lookups 2026"


@dataclass(frozen=True, slots=True)
class WholeLookup:
    """Launches that were timed together. Those `beside` run at the same time as the others, on a link of their own;
    `known_seconds` were measured apart and `watch` is one of `WATCHES`."""

    device: Device
    items: tuple[Item, ...]
    seconds: float
    held_out: bool
    group: str
    name: str
    beside: tuple[Item, ...] = ()
    known_seconds: float = 0.0
    watch: str = ""


def uses_links(lookup: WholeLookup) -> bool:
    """Whether rows or their state come over PCIe or NVLink."""
    calls = [item for item in (*lookup.items, *lookup.beside) if isinstance(item, KernelCall)]
    host = EMBEDDING.fields.index("host")
    return any(call.family is EMBEDDING and (call.values[host] > 0 or call.kind == "cache_fill") for call in calls)


def held_back(configuration: Sequence[object]) -> bool:
    """Whether no fit may see the rows of this configuration: a seeded hash of its columns decides."""
    text = "|".join([_SEED, *("" if part is None or part != part else str(part) for part in configuration)])
    first = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return first / 2.0**64 < HELD_OUT_SHARE


class WholeLookups:
    """Many of them, costed at once for any rates of the embedding family; other families are costed as shipped."""

    def __init__(self, lookups: Sequence[WholeLookup]) -> None:
        self.lookups = tuple(lookups)
        self._main = _Launches([lookup.items for lookup in lookups], self.lookups)
        self._beside = _Launches([lookup.beside for lookup in lookups], self.lookups)
        self.known = np.array([lookup.known_seconds for lookup in lookups])
        self.measured = np.array([lookup.seconds for lookup in lookups])
        self.held_out: BoolArray = np.array([lookup.held_out for lookup in lookups], dtype=np.bool_)

    def seconds(self, rates: Rates, watches: Watches) -> FloatArray:
        """What the stopwatch should have shown."""
        busy = np.maximum(self._main.seconds(rates), self._beside.seconds(rates))
        return np.asarray(self.known + busy + np.array([watches.of(lookup.watch) for lookup in self.lookups]))

    def measurements(self) -> Iterator[tuple[Device, Calls]]:
        """The embedding kernels in them, by device: what was measured, if not each by itself."""
        for launches in (self._main, self._beside):
            yield from ((device, calls) for device, calls, _ in launches.parts)


class _Launches:
    """The launches of many lookups, one after the other within each."""

    def __init__(self, launches: Sequence[tuple[Item, ...]], lookups: Sequence[WholeLookup]) -> None:
        self.others = np.zeros(len(launches))
        costed: dict[tuple[str, KernelCall], float] = {}
        by_device: dict[str, tuple[Device, list[KernelCall], list[int]]] = {}
        for number, (items, lookup) in enumerate(zip(launches, lookups, strict=True)):
            _, own, which = by_device.setdefault(lookup.device.key, (lookup.device, [], []))
            for item in items:
                if isinstance(item, Control):
                    continue
                if item.family is EMBEDDING:
                    own.append(item)
                    which.append(number)
                else:
                    key = (lookup.device.key, item)
                    costed[key] = costed.get(key) or _shipped_seconds(item, lookup.device)
                    self.others[number] += costed[key]
        self.parts: list[tuple[Device, Calls, IntArray]] = [
            (device, Calls.of(EMBEDDING, own), np.array(which, dtype=np.int64))
            for device, own, which in by_device.values()
            if own
        ]

    def seconds(self, rates: Rates) -> FloatArray:
        total = self.others.copy()
        for device, calls, which in self.parts:
            total += np.bincount(which, embedding_seconds(calls, device, rates), minlength=len(total))
        return total


def _shipped_seconds(call: KernelCall, device: Device) -> float:
    return float(price_calls(Calls.of(call.family, [call]), device)[0].seconds[0])

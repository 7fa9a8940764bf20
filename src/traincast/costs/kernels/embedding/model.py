"""Embedding lookups and updates: the memory they touch (`kernels.traffic`), at rates fitted to measured kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from traincast.costs.kernels.call import Calls, Estimate, Family
from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.parameters import SPREAD_GROUPS, EmbeddingParameters
from traincast.costs.kernels.embedding.traffic import Rates, embedding_seconds
from traincast.costs.kernels.model import Measurements, ParametricModel
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from traincast.costs.kernels.embedding.whole import WholeLookups

_LONG_SECONDS = 50e-6  # a kernel this long is mostly memory, not its start
_UNMEASURED = 0.25  # a kind, type or size that was never measured: what the roofline allows itself
_IN_HOST = 0.35  # rows or optimizer state behind a link, in a way that no row has
_PLACES = 4  # values of the field `host`
_SLACK = 1e-6  # beside the limits of what was measured, against rounding
_FP32_BYTES = 4  # the only type that was measured
_SIZES = 5  # of `_sizes`
_LENGTHS = 3  # of them numbers of things; the others are shares
_LINKS = SPREAD_GROUPS.index("links")
_FBGEMM = np.array([kind.startswith("tbe_") for kind in EMBEDDING.kinds])


class EmbeddingModel(ParametricModel[EmbeddingParameters]):
    """Lookups and updates of embedding tables. Fitted state: `parameters_`.

    `start` are the rates that a fit begins with, and keeps where no measured row tells.
    """

    family: ClassVar[Family] = EMBEDDING
    parameters = EmbeddingParameters

    def __init__(self, parameters: EmbeddingParameters | None = None, *, start: Rates | None = None) -> None:
        super().__init__(parameters)
        self.start = start or Rates()

    def fit(self, data: Measurements) -> Self:
        """From kernel times. Spreads stay those of the roofline until `with_spread`."""
        from traincast.costs.kernels.embedding.fitting import fitted_rates

        rates = fitted_rates(data, self.start)
        sigma = np.full(len(SPREAD_GROUPS), _UNMEASURED)
        self.parameters_ = EmbeddingParameters(rates, sigma, _UNMEASURED, *_measured(_by_device(data)))
        return self

    def fit_whole(self, lookups: WholeLookups) -> Self:
        """From whole lookups: the rates that only they tell, and what their stopwatches add."""
        from traincast.costs.kernels.embedding.fitting import fitted_to_whole

        rates, watches = fitted_to_whole(lookups, self.fitted.rates)
        self.parameters_ = replace(self.fitted, rates=rates, watches=watches)
        return self

    def with_spread(
        self, sigma: FloatArray, unseen_sigma: float, checked: Measurements, whole: WholeLookups | None = None
    ) -> Self:
        """The same model with these spreads, whose domain is what it was `checked` on."""
        chips, limits = _measured([*_by_device(checked), *(whole.measurements() if whole else ())])
        parameters = replace(self.fitted, sigma=sigma, unseen_sigma=unseen_sigma, chips=chips, limits=limits)
        return type(self)(parameters, start=self.start)

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        parameters = self.fitted
        seconds = embedding_seconds(calls, device, parameters.rates)
        row = parameters.chips.find(device)
        new_gpu, factor = np.full(len(calls), row < 0), np.ones(len(calls))
        inside = ~new_gpu
        if row >= 0:
            inside, factor = _inside(calls, parameters.limits[row]), _factor_outside(calls, parameters.limits[row])
        variance = np.square(parameters.sigma)[spread_group(calls, seconds)]
        variance += np.where(inside, 0.0, _UNMEASURED**2) + np.where(_linked(calls) & ~inside, _IN_HOST**2, 0.0)
        if row < 0:
            variance += parameters.unseen_sigma**2
        return Estimate(seconds, np.sqrt(variance), inside, factor, new_gpu)


def spread_group(calls: Calls, seconds: FloatArray) -> IntArray:
    """Which of `SPREAD_GROUPS` calls predicted to take so long belong to."""
    return np.where(_linked(calls), _LINKS, np.where(seconds >= _LONG_SECONDS, 0, 1 + _FBGEMM[calls.kind]))


def _linked(calls: Calls) -> BoolArray:
    """Which calls wait for host memory or GPUs next door."""
    return np.asarray((calls["host"] > 0) | calls.is_kind("cache_fill"))


def _sizes(calls: Calls) -> FloatArray:
    """What the domain is told by: lookups, different rows, dim, and how much of the lookups are repeats or in long
    runs, which is how a call shows its skew."""
    lookups, tables = np.maximum(calls["lookups"], 1.0), np.maximum(calls["tables"], 1.0)
    distinct = calls["distinct_rows"]
    shares = (distinct / lookups, calls["long_lookups"] / lookups)
    return np.stack([calls["lookups"], distinct, calls["columns"] / tables, *shares])


def _by_device(data: Measurements) -> list[tuple[Device, Calls]]:
    return [(device, data.calls.take(data.device == index)) for index, device in enumerate(data.devices)]


def _measured(parts: Sequence[tuple[Device, Calls]]) -> tuple[Chips, FloatArray]:
    """The chips of measurements, and the limits of what was measured on each."""
    cards: list[Device] = []
    for device, _ in parts:
        if Chips.of(cards).find(device) < 0:
            cards.append(device)
    chips, kinds = Chips.of(cards), len(EMBEDDING.kinds)
    limits = np.full((len(cards), kinds, _PLACES, 2, _SIZES), np.nan)
    for device, calls in parts:
        chip, sizes, place = chips.find(device), _sizes(calls), calls["host"].astype(np.int64)
        for kind, where in np.unique(np.stack([calls.kind, place], axis=1), axis=0).tolist():
            mine, known = (calls.kind == kind) & (place == where), limits[chip, kind, where]
            known[0] = np.fmin(known[0], sizes[:, mine].min(axis=1) - _SLACK)
            known[1] = np.fmax(known[1], sizes[:, mine].max(axis=1) + _SLACK)
    return chips, limits


def _inside(calls: Calls, limits: FloatArray) -> BoolArray:
    """Which calls are of a kind, a type and sizes measured on a chip; comparing with a missing limit is false."""
    sizes = _sizes(calls)
    least, most = _limits_of(calls, limits)
    plain = ((calls["row_item_bytes"] == _FP32_BYTES) | calls.is_kind("cache_fill")) & calls.is_compute("fp32")
    return np.asarray(plain & ((sizes >= least) & (sizes <= most)).all(axis=0))


def _factor_outside(calls: Calls, limits: FloatArray) -> FloatArray:
    """How many times the farthest of lookups, rows and dim lies beyond the measured ones; 1 inside, and for kinds that
    were not measured. Shares, which may be nothing, are left out."""
    sizes = np.maximum(_sizes(calls)[:_LENGTHS], 1.0)
    least, most = (limit[:_LENGTHS] for limit in _limits_of(calls, limits))
    return np.asarray(np.fmax(np.fmax(least / sizes, sizes / most).max(axis=0), 1.0))


def _limits_of(calls: Calls, limits: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least and most of every size that was measured of the calls' kinds and places."""
    known = limits[calls.kind, np.clip(calls["host"], 0, _PLACES - 1).astype(np.int64)]
    return known[:, 0].T, known[:, 1].T

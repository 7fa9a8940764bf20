"""Embedding lookups and updates: the memory they touch (`kernels.traffic`), at rates fitted to measured kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np

from traincast.arrays import BoolArray, FloatArray, IntArray
from traincast.kernels.call import Calls, Estimate, Family
from traincast.kernels.chips import Chips
from traincast.kernels.embedding import EMBEDDING
from traincast.kernels.embedding.parameters import SPREAD_GROUPS, EmbeddingParameters
from traincast.kernels.embedding.traffic import Rates, embedding_seconds
from traincast.kernels.model import Measurements, ParametricModel
from traincast.platform.device import Device

_LONG_SECONDS = 50e-6  # a kernel this long is mostly memory, not its start
_UNMEASURED = 0.25  # a kind, type or size that was never measured: what the roofline allows itself
_IN_HOST = 0.35  # rows or optimizer state behind PCIe, which no row has
_SLACK = 1e-6  # beside the limits of what was measured, against rounding
_FP32_BYTES = 4  # the only type that was measured
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
        from traincast.kernels.embedding.fitting import fitted_rates

        rates = fitted_rates(data, self.start)
        sigma = np.full(len(SPREAD_GROUPS), _UNMEASURED)
        self.parameters_ = EmbeddingParameters(rates, sigma, _UNMEASURED, *_measured(data))
        return self

    def with_spread(self, sigma: FloatArray, unseen_sigma: float, checked: Measurements) -> Self:
        """The same model with these spreads, whose domain is what it was `checked` on."""
        chips, limits = _measured(checked)
        parameters = replace(self.fitted, sigma=sigma, unseen_sigma=unseen_sigma, chips=chips, limits=limits)
        return type(self)(parameters, start=self.start)

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        parameters = self.fitted
        seconds = embedding_seconds(calls, device, parameters.rates)
        row = parameters.chips.find(device)
        inside = _inside(calls, parameters.limits[row]) if row >= 0 else np.zeros(len(calls), dtype=np.bool_)
        variance = np.square(parameters.sigma)[spread_group(calls, seconds)]
        variance += np.where(inside, 0.0, _UNMEASURED**2) + np.where(calls["host"] > 0, _IN_HOST**2, 0.0)
        if row < 0:
            variance += parameters.unseen_sigma**2
        return Estimate(seconds, np.sqrt(variance), inside)


def spread_group(calls: Calls, seconds: FloatArray) -> IntArray:
    """Which of `SPREAD_GROUPS` calls predicted to take so long belong to."""
    return np.where(seconds >= _LONG_SECONDS, 0, 1 + _FBGEMM[calls.kind])


def _sizes(calls: Calls) -> FloatArray:
    """What the domain is told by: lookups, different rows, dim, and how much of the lookups are repeats or in long
    runs, which is how a call shows its skew."""
    lookups, tables = np.maximum(calls["lookups"], 1.0), np.maximum(calls["tables"], 1.0)
    distinct = calls["distinct_rows"]
    shares = (distinct / lookups, calls["long_lookups"] / lookups)
    return np.stack([calls["lookups"], distinct, calls["columns"] / tables, *shares])


def _measured(data: Measurements) -> tuple[Chips, FloatArray]:
    """The chips of measurements, and the limits of what was measured on each."""
    chips, chip_of = _distinct_chips(data.devices)
    chip, sizes, kinds = chip_of[data.device], _sizes(data.calls), len(EMBEDDING.kinds)
    limits = np.full((len(chips.keys), kinds, 2, len(sizes)), np.nan)
    for row in range(len(chips.keys)):
        for kind in range(kinds):
            mine = (chip == row) & (data.calls.kind == kind)
            if mine.any():
                limits[row, kind] = sizes[:, mine].min(axis=1) - _SLACK, sizes[:, mine].max(axis=1) + _SLACK
    return chips, limits


def _distinct_chips(devices: Sequence[Device]) -> tuple[Chips, IntArray]:
    """One card for each chip, and the chip of every device: the same one may be there at two clocks."""
    cards: list[Device] = []
    chip = []
    for device in devices:
        position = Chips.of(cards).find(device)
        if position < 0:
            position = len(cards)
            cards.append(device)
        chip.append(position)
    return Chips.of(cards), np.array(chip, dtype=np.int64)


def _inside(calls: Calls, limits: FloatArray) -> BoolArray:
    """Which calls are of a kind, a type and sizes measured on a chip; comparing with a missing limit is false."""
    least, most = limits[calls.kind, 0].T, limits[calls.kind, 1].T
    sizes = _sizes(calls)
    plain = (calls["host"] == 0) & (calls["row_item_bytes"] == _FP32_BYTES) & calls.is_compute("fp32")
    return np.asarray(plain & ((sizes >= least) & (sizes <= most)).all(axis=0))

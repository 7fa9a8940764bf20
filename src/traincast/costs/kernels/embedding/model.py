"""Embedding lookups and updates: the memory they touch (`embedding.physics`), at rates fitted to measured kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import Calls, Chips, Estimate, Family, ParametricModel, State
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.physics import Rates, estimate_embedding_seconds
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

WATCHES = ("", "training", "inference", "gradient")
"""What a stopwatch adds: nothing where calls follow each other in a loop; else the start of a lookup on the host, which
differs between training and inference, or the wait for a number of rows in the middle of a dense gradient."""
SPREAD_GROUPS = ("long", "short", "short, FBGEMM", "links")
"""What has a spread of its own: kernels of 50 us or more, shorter ones, FBGEMM's shorter ones, and kernels that wait
for host memory or GPUs next door."""
_RATES = tuple(rate.name for rate in fields(Rates))
_LONG_SECONDS = 50e-6  # a kernel this long is mostly memory, not its start
UNMEASURED = 0.25  # a kind, type or size that was never measured: what the roofline allows itself
_IN_HOST = 0.35  # rows or optimizer state behind a link, in a way that no row has
PLACES = 4  # values of the field `host`
_FP32_BYTES = 4  # the only type that was measured
DOMAIN_SIZES = 5  # of `domain_sizes`
_LENGTHS = 3  # of them numbers of things; the others are shares
_LINKS = SPREAD_GROUPS.index("links")
_FBGEMM = np.array([kind.startswith("tbe_") for kind in EMBEDDING.kinds])


@dataclass(frozen=True, slots=True)
class Watches:
    """Seconds that a stopwatch adds to a whole call, by the words of `WATCHES`."""

    training: float = 1e-4
    inference: float = 2e-4
    gradient: float = 1.5e-4

    def of(self, word: str) -> float:
        """Seconds for one of `WATCHES`."""
        return float(getattr(self, word)) if word else 0.0


@dataclass(frozen=True, slots=True)
class EmbeddingParameters:
    """Fitted rates, a log-sigma for each of `SPREAD_GROUPS`, and what was measured.

    `limits` holds per chip, kind and value of the field `host` the least and the largest of every one of `_sizes`; not
    a number where none was. `watches` is what the stopwatches of whole lookups added, for comparisons with them.
    """

    rates: Rates
    sigma: FloatArray
    unseen_sigma: float
    chips: Chips
    limits: FloatArray
    watches: Watches = field(default_factory=Watches)

    def state(self) -> State:
        """As arrays."""
        return {
            **self.chips.state(),
            **{name: np.array([getattr(self.rates, name)]) for name in _RATES},
            "sigma": self.sigma,
            "unseen_sigma": np.array([self.unseen_sigma]),
            "limits": self.limits,
            "watches": np.array(astuple(self.watches)),
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> EmbeddingParameters:
        """Read back from arrays."""
        rates = Rates(**{name: float(state[name][0]) for name in _RATES})
        sigma, limits = (np.asarray(state[name], dtype=np.float64) for name in ("sigma", "limits"))
        watches = Watches(*state["watches"].tolist())
        unseen = float(state["unseen_sigma"][0])
        return EmbeddingParameters(rates, sigma, unseen, Chips.from_state(state), limits, watches)


class EmbeddingModel(ParametricModel[EmbeddingParameters]):
    """Lookups and updates of embedding tables. Fitted state: `parameters_`."""

    family: ClassVar[Family] = EMBEDDING
    parameters = EmbeddingParameters

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        parameters = self.parameters_
        seconds = estimate_embedding_seconds(calls, device, parameters.rates)
        row = parameters.chips.find(device)
        new_gpu, factor = np.full(len(calls), row < 0), np.ones(len(calls))
        inside = ~new_gpu
        if row >= 0:
            inside, factor = (
                _is_inside(calls, parameters.limits[row]),
                _measure_factor_outside(calls, parameters.limits[row]),
            )
        variance = np.square(parameters.sigma)[name_spread_group(calls, seconds)]
        variance += np.where(inside, 0.0, UNMEASURED**2) + np.where(_uses_link(calls) & ~inside, _IN_HOST**2, 0.0)
        if row < 0:
            variance += parameters.unseen_sigma**2
        return Estimate(seconds, np.sqrt(variance), inside, factor, new_gpu)


def name_spread_group(calls: Calls, seconds: FloatArray) -> IntArray:
    """Which of `SPREAD_GROUPS` calls predicted to take so long belong to."""
    return np.where(_uses_link(calls), _LINKS, np.where(seconds >= _LONG_SECONDS, 0, 1 + _FBGEMM[calls.kind]))


def _uses_link(calls: Calls) -> BoolArray:
    """Which calls wait for host memory or GPUs next door."""
    return np.asarray((calls["host"] > 0) | calls.is_kind("cache_fill"))


def list_domain_sizes(calls: Calls) -> FloatArray:
    """What the domain is told by: lookups, different rows, dim, and how much of the lookups are repeats or in long
    runs, which is how a call shows its skew."""
    lookups, tables = np.maximum(calls["lookups"], 1.0), np.maximum(calls["tables"], 1.0)
    distinct = calls["distinct_rows"]
    shares = (distinct / lookups, calls["long_lookups"] / lookups)
    return np.stack([calls["lookups"], distinct, calls["columns"] / tables, *shares])


def _is_inside(calls: Calls, limits: FloatArray) -> BoolArray:
    """Which calls are of a kind, a type and sizes measured on a chip; comparing with a missing limit is false."""
    sizes = list_domain_sizes(calls)
    least, most = _get_limits(calls, limits)
    plain = ((calls["row_item_bytes"] == _FP32_BYTES) | calls.is_kind("cache_fill")) & calls.is_compute("fp32")
    return np.asarray(plain & ((sizes >= least) & (sizes <= most)).all(axis=0))


def _measure_factor_outside(calls: Calls, limits: FloatArray) -> FloatArray:
    """How many times the farthest of lookups, rows and dim is beyond the measured ones; 1 inside, and for kinds that
    were not measured. Shares, which may be nothing, are left out."""
    sizes = np.maximum(list_domain_sizes(calls)[:_LENGTHS], 1.0)
    least, most = (limit[:_LENGTHS] for limit in _get_limits(calls, limits))
    return np.asarray(np.fmax(np.fmax(least / sizes, sizes / most).max(axis=0), 1.0))


def _get_limits(calls: Calls, limits: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least and most of every size that was measured of the calls' kinds and places."""
    known = limits[calls.kind, np.clip(calls["host"], 0, PLACES - 1).astype(np.int64)]
    return known[:, 0].T, known[:, 1].T

"""What the embedding model has learned: rates, spreads, and where they were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.embedding.traffic import Rates
from traincast.costs.kernels.embedding.watches import Watches
from traincast.costs.kernels.model import State
from traincast.utils.arrays import FloatArray

SPREAD_GROUPS = ("long", "short", "short, FBGEMM", "links")
"""What has a spread of its own: kernels of 50 us or more, shorter ones, FBGEMM's shorter ones, and kernels that wait
for host memory or GPUs next door."""
_RATES = tuple(rate.name for rate in fields(Rates))


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

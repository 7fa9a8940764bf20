"""What the embedding model has learned: rates, spreads, and where they were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.arrays import FloatArray
from traincast.kernels.chips import Chips
from traincast.kernels.embedding.traffic import Rates
from traincast.kernels.model import State

SPREAD_GROUPS = ("long", "short", "short, FBGEMM")
"""What has a spread of its own: kernels of 50 us or more, shorter ones, and FBGEMM's shorter ones."""
_RATES = tuple(field.name for field in fields(Rates))


@dataclass(frozen=True, slots=True)
class EmbeddingParameters:
    """Fitted rates, a log-sigma for each of `SPREAD_GROUPS`, and what was measured.

    `limits` holds per chip and kind the least and the largest of every one of `_sizes`; not a number where none was.
    """

    rates: Rates
    sigma: FloatArray
    unseen_sigma: float
    chips: Chips
    limits: FloatArray

    def state(self) -> State:
        """As arrays."""
        return {
            **self.chips.state(),
            **{name: np.array([getattr(self.rates, name)]) for name in _RATES},
            "sigma": self.sigma,
            "unseen_sigma": np.array([self.unseen_sigma]),
            "limits": self.limits,
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> EmbeddingParameters:
        """Read back from arrays."""
        rates = Rates(**{name: float(state[name][0]) for name in _RATES})
        sigma, limits = (np.asarray(state[name], dtype=np.float64) for name in ("sigma", "limits"))
        return EmbeddingParameters(rates, sigma, float(state["unseen_sigma"][0]), Chips.from_state(state), limits)

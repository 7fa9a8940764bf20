"""What the attention model has learned: weights of its features per device and per kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.attention.physics import KERNEL_NAMES, kernel_of
from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.model import State
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """Feature weights per device (those of the cache copy last), pooled ones per kernel, spreads, fitted sizes."""

    chips: Chips
    weights: FloatArray
    pooled: FloatArray  # a row for each of `KERNEL_NAMES`
    sigma: FloatArray
    unseen_sigma: float
    limits: FloatArray  # per device: least and largest query length and head dimension, most elements of the query
    backward: FloatArray  # weights of `BACKWARD_FEATURES` on chips of `BACKWARD_KERNEL`
    backward_sigma: float

    def state(self) -> State:
        """As arrays."""
        return {
            **self.chips.state(),
            "weights": self.weights,
            "pooled": self.pooled,
            "sigma": self.sigma,
            "unseen_sigma": np.array([self.unseen_sigma]),
            "limits": self.limits,
            "backward": self.backward,
            "backward_sigma": np.array([self.backward_sigma]),
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> AttentionParameters:
        """Read back from arrays."""
        names = ("weights", "pooled", "sigma", "limits", "backward")
        weights, pooled, sigma, limits, backward = (np.asarray(state[name], dtype=np.float64) for name in names)
        unseen, spread = (float(state[name][0]) for name in ("unseen_sigma", "backward_sigma"))
        return AttentionParameters(Chips.from_state(state), weights, pooled, sigma, unseen, limits, backward, spread)

    def weights_on(self, device: Device) -> FloatArray:
        """Weights of the device, of its chip, or of its kernel on other devices."""
        row = self.chips.find(device)
        return np.asarray(self.pooled[KERNEL_NAMES.index(kernel_of(device))] if row < 0 else self.weights[row])

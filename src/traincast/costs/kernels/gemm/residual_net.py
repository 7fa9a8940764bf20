"""A small network that corrects a physical estimate: features and a device's code in, log of the correction out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.model import State

Float32Array = npt.NDArray[np.float32]

_VECTORS = ("mean", "scale", "least", "most", "codes")
_COLDEST = np.float32(-80.0)  # exp(80) still fits in 32 bits
_BLOCK = 512  # calls at once, in arrays used again: fresh ones cost more than the arithmetic
_FURTHEST = 3.0  # no measured kernel is further than this (in log) from its physical estimate


@dataclass(frozen=True, slots=True)
class ResidualNet:
    """Fully connected layers with SiLU between them.

    `codes` has one row per fitted device. Features are shifted by `mean`, scaled by `scale`, and held inside
    [`least`, `most`], the range seen in fitting, so that nothing is extrapolated but the physics.
    """

    mean: Float32Array
    scale: Float32Array
    least: Float32Array
    most: Float32Array
    codes: Float32Array
    weights: tuple[Float32Array, ...]
    biases: tuple[Float32Array, ...]

    def normalised(self, features: Float32Array) -> Float32Array:
        """Features (one row each) as the network reads them."""
        x = (features - self.mean[:, None]) * self.scale[:, None]
        return np.asarray(np.minimum(np.maximum(x, self.least[:, None]), self.most[:, None]))

    def correction(self, features: Float32Array, code: Float32Array) -> Float32Array:
        """Log of measured over physical time, for calls on the device with this code."""
        known, first, total = len(self.mean), self.weights[0], features.shape[1]
        shift = (code @ first[known:] + self.biases[0], *self.biases[1:])
        output = np.empty(total, dtype=np.float32)
        room = np.empty((2, max(len(bias) for bias in shift), _BLOCK), dtype=np.float32)
        for start in range(0, total, _BLOCK):
            h = self.normalised(features[:, start : start + _BLOCK])
            width = h.shape[1]
            z = np.matmul(first[:known].T, h, out=room[0, : len(shift[0]), :width])
            z += shift[0][:, None]
            for weight, bias in zip(self.weights[1:], shift[1:], strict=True):
                h = _activate_layer(z, room[1, : len(z), :width])
                z = np.matmul(weight.T, h, out=room[0, : len(bias), :width])
                z += bias[:, None]
            output[start : start + _BLOCK] = z[0]
        return np.asarray(np.clip(output, -_FURTHEST, _FURTHEST))

    def state(self, prefix: str) -> State:
        """The network as arrays whose names start with `prefix`."""
        arrays: State = {f"{prefix}_{name}": getattr(self, name) for name in _VECTORS}
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            arrays[f"{prefix}_weight{i}"], arrays[f"{prefix}_bias{i}"] = weight, bias
        return arrays

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]], prefix: str) -> ResidualNet:
        """The network read back."""
        depth = sum(name.startswith(f"{prefix}_weight") for name in state)
        weights, biases = (tuple(state[f"{prefix}_{kind}{i}"] for i in range(depth)) for kind in ("weight", "bias"))
        return ResidualNet(**{name: state[f"{prefix}_{name}"] for name in _VECTORS}, weights=weights, biases=biases)


def compute_gate(z: Float32Array) -> Float32Array:
    """The logistic function; SiLU is z times it."""
    return np.asarray(np.float32(1) / (np.float32(1) + np.exp(-np.maximum(z, _COLDEST))))


def _activate_layer(z: Float32Array, out: Float32Array) -> Float32Array:
    """SiLU of `z`, written to `out`."""
    np.maximum(z, _COLDEST, out=out)
    np.negative(out, out=out)
    np.exp(out, out=out)
    out += np.float32(1)
    return np.divide(z, out, out=out)

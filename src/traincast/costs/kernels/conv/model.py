"""Convolutions: the fastest of the ways to compute one, as cuDNN's search finds, plus a learned residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.call import Calls, Estimate, Family
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.conv.parameters import TENSOR_TYPES, ConvParameters, algorithm_seconds
from traincast.costs.kernels.conv.physics import Geometry, depthwise_seconds
from traincast.costs.kernels.conv.residual import ConvTrees, own_features, shared_features
from traincast.costs.kernels.model import KernelModel, Measurements, State
from traincast.costs.kernels.streaming.memory import START_SECONDS
from traincast.hardware.device import AMPERE, Device
from traincast.utils.arrays import BoolArray, FloatArray

_LEAST_TENSOR_CHANNELS = 8  # an image's three channels do not fill a matrix instruction; cuDNN takes plain cores
_PIECE = 8192  # calls at once: their features stay in the CPU's cache
_FEW_CHANNELS = 64  # up to which the heuristic takes what a search finds


class ConvModel(KernelModel):
    """Forward, data gradient and filter gradient. Fitted state: `parameters_`, and `residual_` (trees)."""

    family: ClassVar[Family] = CONV
    UNMEASURED: ClassVar[float] = 0.2  # log-sigma added off 3x3 forward in fp32, where data is thin
    _DEPTHWISE: ClassVar[float] = 0.6  # log-sigma: assumed, there is no data for it
    _UNSEARCHED: ClassVar[float] = 1.0  # time of a plain implicit GEMM over that of the fastest one

    def __init__(self, parameters: ConvParameters | None = None, residual: ConvTrees | None = None) -> None:
        self.parameters_ = parameters
        self.residual_ = residual

    def fit(self, data: Measurements) -> Self:
        """From device times of any kinds and compute types."""
        from traincast.costs.kernels.conv.fitting import fit_trees, fit_weights

        self.parameters_ = fit_weights(data)
        tensor = data.calls.is_compute(*TENSOR_TYPES) & (data.calls["in_channels"] >= _LEAST_TENSOR_CHANNELS)
        self.residual_ = fit_trees(self.parameters_, data, tensor)
        return self

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        assert self.parameters_ is not None, "the model has not been fitted"
        g = Geometry.of(calls)
        tensor = calls.is_compute(*[name for name in TENSOR_TYPES if name in device.peak_flops])
        tensor &= g.channels >= _LEAST_TENSOR_CHANNELS
        by_algorithm = algorithm_seconds(self.parameters_, calls, g, device, tensor)
        seconds = by_algorithm.min(axis=1)
        row = self.parameters_.chips.find(device)
        learned = self._correct(seconds, by_algorithm, calls, g, device, tensor)
        unsearched = ~(g.winograd | g.winograd5 | tensor | calls.is_kind("backward_weights"))
        unsearched &= np.minimum(g.channels, g.filters) > _FEW_CHANNELS
        seconds = np.where(unsearched, self._UNSEARCHED * seconds, seconds)
        turns = tensor & (calls["channels_last"] == 0)
        seconds = seconds + _layout_seconds(g, device, calls.item_bytes(), turns)
        depthwise = (g.groups > 1) & (g.channels == 1)
        seconds = np.where(depthwise, 8e-6 + depthwise_seconds(g, device, calls.item_bytes()), seconds)
        sigma = np.full(len(calls), self.parameters_.unseen_sigma if row < 0 else float(self.parameters_.sigma[row]))
        sigma = np.where(learned, sigma, np.hypot(sigma, self.UNMEASURED))
        sigma = np.where(depthwise, self._DEPTHWISE, np.hypot(sigma, 8e-6 / seconds))
        factor = self.parameters_.factor_outside(g)
        known, new_gpu = learned & (factor <= 1.0), np.full(len(calls), row < 0)
        return Estimate(seconds, sigma, known, np.where(learned, factor, 1.0), new_gpu)

    def _correct(
        self, seconds: FloatArray, ways: FloatArray, calls: Calls, g: Geometry, device: Device, tensor: BoolArray
    ) -> BoolArray:
        """Multiplies `seconds` by what the trees say, in place; which calls were measured by the thousand."""
        trees = self.residual_
        chip_trees = trees.find(device) if trees is not None else None
        learned = self._in_learned_domain(calls, g) & (chip_trees is not None)
        for rows in _pieces(learned):
            assert chip_trees is not None
            features = own_features(Geometry.of(calls.take(rows)), device, ways[rows])
            seconds[rows] *= np.exp(chip_trees.predict(features))
        if trees is not None:
            for rows in _pieces(~learned & trees.shares(calls, g, device, tensor)):
                part = calls.take(rows)
                features = shared_features(part, Geometry.of(part), device, ways[rows])
                seconds[rows] *= np.exp(trees.shared.predict(features))
        return learned

    def state(self) -> State:
        """Coefficients and trees."""
        assert self.parameters_ is not None and self.residual_ is not None, "the model has not been fitted"
        return {**self.parameters_.state(), **self.residual_.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with these coefficients and trees."""
        return cls(ConvParameters.from_state(state), ConvTrees.from_state(state))

    @staticmethod
    def _in_learned_domain(calls: Calls, g: Geometry) -> BoolArray:
        return np.asarray(g.winograd & calls.is_kind("forward"))


class UnsearchedConvModel(ConvModel):
    """Convolutions as PyTorch runs them unless `cudnn.benchmark` is set: a heuristic picks the way. Where Winograd
    does not apply, tensor cores do not compute and there are many channels, it takes slower kernels forwards and for
    data gradients (`implicit_convolve_sgemm`, `dgrad_engine`): 1.34 and 1.38 times the time of the searched ones in the
    ResNet-50 trace of V100."""

    _UNSEARCHED: ClassVar[float] = 1.36


def _pieces(chosen: BoolArray) -> list[npt.NDArray[np.intp]]:
    """The chosen rows, a few thousand at a time: their features then stay in cache."""
    rows = np.flatnonzero(chosen)
    return [rows[start : start + _PIECE] for start in range(0, len(rows), _PIECE)]


def _layout_seconds(g: Geometry, device: Device, item: FloatArray, turns: BoolArray) -> FloatArray:
    """Tensor-core kernels since Ampere want channels last; cuDNN turns PyTorch's layout there and back. So does MIOpen,
    the filters too, in kernels of their own that are mostly start where tensors are small."""
    amd = device.vendor == "amd"
    if not amd and not device.since(AMPERE):
        return np.zeros(len(item))
    values = g.input_size + g.output_size + (g.filter_size if amd else 0.0)
    turned = 2.0 * item * values / (0.82 * device.dram_bandwidth) + (3.0 * START_SECONDS if amd else 0.0)
    return np.where(turns, turned, 0.0)

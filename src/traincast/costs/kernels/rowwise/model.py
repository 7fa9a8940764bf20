"""Row-wise kernels: softmax, layer norm, and batch norm by the same physics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import (
    Calls,
    Chips,
    Estimate,
    Family,
    KernelModel,
    ParametricModel,
    State,
    get_clock_hz,
)
from traincast.costs.kernels.rowwise import NORM, SOFTMAX
from traincast.costs.kernels.rowwise.physics import (
    Features,
    compute_layer_norm_features,
    compute_softmax_features,
    estimate_stream_seconds,
)
from traincast.costs.kernels.streaming.model import DeviceView, StreamParameters
from traincast.costs.kernels.streaming.physics import START_SECONDS, START_SPREAD
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray

ROW_STEP, COL_STEP = 1.0, 0.5  # of the residual map, in octaves
ROW_KNOTS, COL_KNOTS = 23, 29  # up to 2**22 rows and 2**14 columns, what was measured
LEAST_TRAFFIC = 1.8  # one read and one write, on a card that does better than its kind
_DERIVED_SPREAD = 0.2  # log-sigma added to kernels derived from a measured relative, and outside the measured widths
_WARP_COLS, _VECTOR_BYTES = 1024, 16.0  # shorter rows are kept by one warp; loads of longer ones are so wide
# of a block's load and of the rest of a row, in 16 bits and not aligned: H100, 5,185 and 3,137 columns
_BLOCK, _LOAD_CYCLES, _ROW_CYCLES = 1024.0, 640.0, 2250.0
_SM_THREADS = 2048.0
_TILE = 32.0  # rows and columns
_COLUMN_CYCLES = 1800.0  # of one tile, a trip to memory and the sums: timm's small Transformers on PyTorch 1.10
_SECOND_PASS = 1.2e-6  # batch norm reads again what it has just summed
# PyTorch's own batch norm gives a channel one block, whose threads wait for one load after the other (cycles of a trip
# to memory, longer across AMD's chiplets; with the MI300X trace in view). Backward makes two passes
_OWN_THREADS, _OWN_CYCLES = {"nvidia": 512.0, "amd": 256.0}, {"nvidia": 420.0, "amd": 700.0}


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Fitted state: feature coefficients and a residual map per device, pooled coefficients, spreads, limits.

    `maps[d, i, j]` is the log of measured over modelled time near 2**i rows and 2**(j/2) columns.
    """

    chips: Chips
    coefficients: FloatArray
    pooled: FloatArray
    maps: FloatArray
    sigma: FloatArray
    unseen_sigma: float
    cols_range: tuple[float, float]

    def seconds(
        self, features: Features, device: Device, rows: FloatArray, cols: FloatArray, item: FloatArray
    ) -> tuple[FloatArray, bool, float]:
        """Device seconds, whether the chip was measured, and the spread that goes with it."""
        row = self.chips.find(device)
        weights = self.pooled if row < 0 else self.coefficients[row]
        seconds = START_SECONDS + LEAST_TRAFFIC * estimate_stream_seconds(device, rows, cols, item)
        seconds = seconds + features(device, rows, cols, item) @ weights
        if row < 0:
            return seconds, False, self.unseen_sigma
        return seconds * np.exp(_interpolate_map(self.maps[row], rows, cols)), True, float(self.sigma[row])

    def state(self) -> State:
        """As arrays; the maps in half the package, they are corrections of a few percent."""
        return {
            **self.chips.state(),
            "coefficients": self.coefficients,
            "pooled": self.pooled,
            "maps": self.maps.astype(np.float32),
            "sigma": self.sigma,
            "scalars": np.array([self.unseen_sigma, *self.cols_range]),
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> RowParameters:
        """Read back from arrays."""
        unseen, low, high = (float(value) for value in state["scalars"])
        arrays = {
            name: np.asarray(state[name], dtype=np.float64) for name in ("coefficients", "pooled", "maps", "sigma")
        }
        return RowParameters(chips=Chips.from_state(state), unseen_sigma=unseen, cols_range=(low, high), **arrays)


def compute_knot_weights(values: FloatArray, step: float, knots: int) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """The knot below each value, `step` octaves apart, and how far towards the next one the value is."""
    place = np.clip(np.log2(np.maximum(values, 1.0)) / step, 0.0, knots - 1.001)
    low = place.astype(np.int64)
    return low, place - low


def _interpolate_map(table: FloatArray, rows: FloatArray, cols: FloatArray) -> FloatArray:
    i, u = compute_knot_weights(rows, ROW_STEP, ROW_KNOTS)
    j, v = compute_knot_weights(cols, COL_STEP, COL_KNOTS)
    flat, stride = table.ravel(), table.shape[1]
    corner = i * stride + j
    lower = flat[corner] * (1 - v) + flat[corner + 1] * v
    upper = flat[corner + stride] * (1 - v) + flat[corner + stride + 1] * v
    return np.asarray(lower * (1 - u) + upper * u)


class SoftmaxModel(ParametricModel[RowParameters]):
    """Softmax and log-softmax over the last dimension. A row that a warp keeps is read once, in the backward pass two
    are; a longer one is read three times in either pass."""

    family: ClassVar[Family] = SOFTMAX
    parameters = RowParameters
    _BACKWARD_TRAFFIC: ClassVar[float] = 1.5  # of kept rows: three tensors through memory where the forward has two

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        rows, cols = calls["rows"], calls["cols"]
        seconds, known, sigma = self.parameters_.seconds(
            compute_softmax_features, device, rows, cols, calls.item_bytes()
        )
        seconds = np.maximum(seconds, _compute_unaligned_seconds(calls, device))
        backward = calls.is_kind("backward", "log_backward") & (cols <= _WARP_COLS)
        seconds = np.where(backward, self._BACKWARD_TRAFFIC, 1.0) * seconds
        derived = ~(calls.is_kind("forward", "log_forward") & calls.is_compute("fp32"))
        return _make_estimate(seconds, sigma, derived, _measure_factor_outside(cols, self.parameters_), known=known)


def _compute_unaligned_seconds(calls: Calls, device: Device) -> FloatArray:
    """Seconds of softmax rows in 16 bits that are not aligned; 0 for others.

    PyTorch keeps a row in shared memory where its vectors fit it. Else a block of 1,024 threads goes through it three
    times, vector by vector as far as those fill the block, then element by element, and waits for each load.
    """
    item, cols = calls.item_bytes(), calls["cols"]
    unaligned = (cols > _WARP_COLS) & (item < 4.0) & ((item * cols) % _VECTOR_BYTES != 0)
    whole, rest = np.divmod(cols, _BLOCK * _VECTOR_BYTES / item)
    cycles = 3.0 * _LOAD_CYCLES * (whole + np.ceil(rest / _BLOCK)) + _ROW_CYCLES
    together = device.num_sms * _SM_THREADS / _BLOCK
    return np.where(unaligned, calls["rows"] * cycles / (together * get_clock_hz(device)), 0.0)


class NormModel(KernelModel):
    """Layer norm as measured; its backward and batch norm from the traffic they cause."""

    family: ClassVar[Family] = NORM
    _LAYER_BACKWARD: ClassVar[float] = 1.6  # two inputs where the forward has one, both read twice
    _WEIGHT_START: ClassVar[float] = 6e-6  # column sums meet through global memory

    def __init__(self, parameters: RowParameters, streams: StreamParameters) -> None:
        self.parameters_ = parameters
        self.streams_ = streams

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        rows, cols, item = calls["rows"], calls["cols"], calls.item_bytes()
        layer, known, sigma = self.parameters_.seconds(compute_layer_norm_features, device, rows, cols, item)
        view = self.streams_.view(device)
        size = rows * cols * item
        weights = self._WEIGHT_START + view.memory.seconds(2.0 * size / 0.7, 0.0 * size)
        columns = np.maximum(weights, _estimate_column_pass(calls, device))
        block = _estimate_own_pass(calls, device)
        statistics = START_SECONDS + np.maximum(block, view.memory.seconds(size, 0.0 * size))
        gradient = START_SECONDS + np.maximum(2.0 * block, view.memory.seconds(4.0 * size, size))
        kinds = [
            calls.is_kind(kind)
            for kind in (
                "layer_forward", "layer_backward", "layer_backward_weights", "layer_backward_columns",
                "batch_statistics", "batch_backward_own",
            )
        ]  # fmt: skip
        each = [layer, self._LAYER_BACKWARD * layer, weights, columns, statistics, gradient]
        seconds = np.select(kinds, each, _estimate_batch_norm(calls, device, view))
        derived = ~(calls.is_kind("layer_forward") & calls.is_compute("fp32"))
        return _make_estimate(seconds, sigma, derived, _measure_factor_outside(cols, self.parameters_), known=known)

    def state(self) -> State:
        """The fitted parameters of layer norm and of the memory system."""
        return {**self.parameters_.state(), **{f"stream_{name}": a for name, a in self.streams_.state().items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with these parameters."""
        streams = {name.removeprefix("stream_"): a for name, a in state.items() if name.startswith("stream_")}
        return cls(RowParameters.from_state(state), StreamParameters.from_state(streams))


def _estimate_column_pass(calls: Calls, device: Device) -> FloatArray:
    """Seconds in which blocks of 32 columns go through all rows, 32 at a time."""
    waves = np.ceil(calls["cols"] / (_TILE * device.num_sms))
    return np.asarray(waves * np.ceil(calls["rows"] / _TILE) * _COLUMN_CYCLES / get_clock_hz(device))


def _estimate_own_pass(calls: Calls, device: Device) -> FloatArray:
    """Seconds in which the blocks of PyTorch's own batch norm go through their channels once."""
    threads, cycles = _OWN_THREADS[device.vendor], _OWN_CYCLES[device.vendor]
    waves = np.ceil(calls["rows"] * threads / (_SM_THREADS * device.num_sms))
    return np.asarray(waves * np.ceil(calls["cols"] / threads) * cycles / get_clock_hz(device))


def _estimate_batch_norm(calls: Calls, device: Device, view: DeviceView) -> FloatArray:
    """One block per channel (few leave SMs idle), or all SMs where channels are last. Training reads its input twice,
    backward both inputs twice."""
    size = calls["rows"] * calls["cols"] * calls.item_bytes()
    backward, inference = calls.is_kind("batch_backward", "batch_backward_last"), calls.is_kind("batch_inference")
    spread = inference | calls.is_kind("batch_forward_last", "batch_backward_last")
    reads = np.select([backward, inference], [4.0, 1.0], 2.0)
    passes = np.where(backward, 0.85, 0.9)  # those of a block follow one another
    share = np.where(inference, 1.0, np.where(spread, np.sqrt(passes), passes))
    busy = np.where(spread, 1.0, np.minimum(1.0, 1.15 * np.maximum(calls["rows"], 1.0) / device.num_sms))
    stream = view.memory.seconds(reads * size, size)
    return np.asarray(START_SECONDS + _SECOND_PASS + stream / (share * busy))


def _measure_factor_outside(cols: FloatArray, parameters: RowParameters) -> FloatArray:
    """How many times rows are longer or shorter than the measured ones; 1 inside."""
    low, high = parameters.cols_range
    return np.asarray(np.maximum(np.maximum(low / np.maximum(cols, 1.0), cols / high), 1.0))


def _make_estimate(
    seconds: FloatArray, sigma: float, derived: BoolArray, factor: FloatArray, *, known: bool
) -> Estimate:
    """With the spread of what was measured, of its relatives and of other widths."""
    measured = ~derived & (factor <= 1.0)
    total = np.hypot(sigma, np.where(measured, 0.0, _DERIVED_SPREAD))
    spread = np.hypot(total, START_SPREAD * START_SECONDS / seconds)
    return Estimate(seconds, spread, measured & known, np.where(derived, 1.0, factor), np.full(len(seconds), not known))

"""Convolutions: the fastest of the ways to compute one, as cuDNN's search finds, plus what trees have learned beyond
physics.

Boosted symmetric trees, small enough to keep as arrays and fast enough to ask a million times: every node of one level
tests the same feature against the same threshold, so that a row's leaf is a number made of a few comparisons. Beyond
the data a tree is constant: what it corrects keeps the trend of the physics below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import (
    WAITING_SHARE,
    ArrayRecord,
    Calls,
    Chips,
    Estimate,
    Family,
    KernelModel,
    State,
)
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.conv.physics import (
    Geometry,
    compute_implicit_gemm_features,
    compute_nonfused_winograd_features,
    compute_winograd_features,
    estimate_depthwise_seconds,
    estimate_direct_seconds,
    estimate_forward_tile_seconds,
)
from traincast.costs.kernels.streaming.physics import START_SECONDS
from traincast.hardware.device import ADA, AMPERE, PASCAL, TURING, VOLTA, Device
from traincast.utils.arrays import BoolArray, FloatArray

SingleArray = npt.NDArray[np.float32]
_CHUNK = 8192  # rows at once: their features stay in the CPU's cache
_GENERATIONS = (PASCAL, VOLTA, TURING, AMPERE, ADA)  # compute capabilities at which a generation of kernels begins
_MOST_RATIO = 100.0  # of a way that hardly applies


@dataclass(frozen=True, slots=True)
class Boosting:
    """Trees as arrays: `feature` and `threshold` are [trees, depth], `leaf` is [trees, 2**depth]."""

    feature: npt.NDArray[np.int64]
    threshold: SingleArray
    leaf: FloatArray

    def predict(self, features: FloatArray) -> FloatArray:
        """The sum of all trees for every row, in pieces that stay in cache and buffers that are used again."""
        total = np.zeros(len(features))
        for start in range(0, len(features), _CHUNK):
            columns = list(np.ascontiguousarray(features[start : start + _CHUNK].T, dtype=np.float32))
            part = total[start : start + _CHUNK]
            above = np.empty(len(part), dtype=np.bool_)
            leaf = np.empty(len(part), dtype=np.uint8)  # depth is at most 8
            index, gained = np.empty(len(part), dtype=np.intp), np.empty(len(part))
            for features_of, thresholds, leaves in zip(self.feature.tolist(), self.threshold, self.leaf, strict=True):
                leaf[:] = 0
                for column, threshold in zip(features_of, thresholds, strict=True):
                    np.add(leaf, leaf, out=leaf)
                    np.greater(columns[column], threshold, out=above)
                    np.add(leaf, above.view(np.uint8), out=leaf)
                np.copyto(index, leaf)
                part += leaves.take(index, out=gained, mode="clip")  # without `mode`, take copies its buffer
        return total

    def state(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """As arrays, single precision: leaves are corrections of a few percent."""
        return {
            f"{prefix}_feature": self.feature.astype(np.int16),
            f"{prefix}_threshold": self.threshold,
            f"{prefix}_leaf": self.leaf.astype(np.float32),
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]], prefix: str) -> Boosting:
        """Read back from arrays."""
        return Boosting(
            state[f"{prefix}_feature"].astype(np.int64),
            state[f"{prefix}_threshold"].astype(np.float32),
            state[f"{prefix}_leaf"].astype(np.float64),
        )


@dataclass(frozen=True, slots=True)
class ConvTrees:
    """Trees of every chip for 3x3 forward in fp32, and those of all chips for the rest.

    `chips` are in the order of `own`; `shared_chips` have rows of `shared`, in fp16 too where `shared_tensor`.
    """

    chips: Chips
    own: tuple[Boosting, ...]
    shared_chips: Chips
    shared_tensor: BoolArray
    shared: Boosting

    def find(self, device: Device) -> Boosting | None:
        """The trees of this device's chip, if it has been measured by the thousand."""
        row = self.chips.find(device)
        return None if row < 0 else self.own[row]

    def shares(self, calls: Calls, g: Geometry, device: Device, tensor: BoolArray) -> BoolArray:
        """Which calls are of a type and kind that the shared trees were fitted on, on this chip."""
        row = self.shared_chips.find(device)
        if row < 0:
            return np.zeros(len(calls), dtype=np.bool_)
        measured = calls.is_compute("fp32") | (calls.is_compute("fp16") & tensor & self.shared_tensor[row])
        return np.asarray(measured & (g.groups == 1))

    def state(self) -> State:
        """As arrays."""
        arrays = {f"own_{name}": value for name, value in self.chips.state().items()}
        arrays |= {f"shared_{name}": value for name, value in self.shared_chips.state().items()}
        for row, trees in enumerate(self.own):
            arrays |= trees.state(f"own{row}")
        return {**arrays, **self.shared.state("shared"), "shared_tensor": self.shared_tensor.astype(np.int8)}

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> ConvTrees:
        """Read back from arrays."""
        own, shared = (
            Chips.from_state({name.removeprefix(prefix): value for name, value in state.items()})
            for prefix in ("own_", "shared_")
        )
        trees = tuple(Boosting.from_state(state, f"own{row}") for row in range(len(own.keys)))
        return ConvTrees(own, trees, shared, state["shared_tensor"] != 0, Boosting.from_state(state, "shared"))


def compute_own_tree_features(g: Geometry, device: Device, by_algorithm: FloatArray) -> FloatArray:
    """What the trees of one chip may look at: sizes, how they divide, how the ways compare and their tiles round up."""
    ordered = np.sort(by_algorithm, axis=1)
    best = ordered[:, 0]
    tiles = g.batch * np.ceil(g.out_h / 4) * np.ceil(g.out_w / 4)
    transformed = tiles * (g.channels + g.filters)
    unit = device.dram_bandwidth * best
    sizes = [
        g.batch, g.channels, g.filters, g.height, g.batch * g.out_h * g.out_w, best, ordered[:, 1] / best, tiles,
        g.channels * g.filters, transformed, transformed / unit, g.channels * g.filters / unit, g.input_size,
        g.output_size, (g.input_size + g.output_size) / unit,
    ]  # fmt: skip
    parts = [
        g.height % 2, g.height % 4, g.channels % 4, g.channels % 8, g.channels % 32, g.filters % 4, g.filters % 32,
        g.filters % 64, g.filters % 128,
    ]  # fmt: skip
    ratios = np.array([*estimate_forward_tile_seconds(g, device), *by_algorithm.T]) / best
    return np.concatenate([np.log2(np.array(sizes)), np.array(parts), np.log2(ratios)]).T


def compute_shared_tree_features(calls: Calls, g: Geometry, device: Device, by_algorithm: FloatArray) -> FloatArray:
    """What the shared trees may look at: sizes, kind and type, how the ways compare, and the device's balance."""
    best = by_algorithm.min(axis=1)
    moved = g.total_size * calls.item_bytes() / device.dram_bandwidth
    sizes = [
        g.batch, g.channels, g.filters, g.height, g.width, g.batch * g.out_h * g.out_w, g.taps, best, g.filter_size,
        g.input_size, g.output_size, moved / best, *np.minimum(by_algorithm / best[:, None], _MOST_RATIO).T,
    ]  # fmt: skip
    age = sum(not device.is_capability_below(capability) for capability in _GENERATIONS)
    constants = (device.num_sms, device.get_sustained_flops("fp32") / device.dram_bandwidth, age)
    parts = [
        g.kernel_h, g.kernel_w, g.stride, g.filters % 32, g.channels % 32, g.data, g.weights, calls.is_compute("fp16"),
        *(np.full(len(best), float(value)) for value in constants),
    ]  # fmt: skip
    return np.concatenate([np.log2(np.array(sizes)), np.array(parts, dtype=np.float64)]).T


TENSOR_TYPES = ("tf32", "fp16", "bf16", "fp8")
"""Types that tensor cores multiply."""
FIXED_SECONDS = (8e-6, 14e-6)  # seconds of the small helper kernels and the first loads of either Winograd
_FIRST_COLUMN_SECONDS = 10e-6  # of the implicit GEMM's first column
# columns of the weights: implicit GEMM forward, data, filters (3 each); fused (3) and four-kernel Winograd (4)
GEMM_COLUMNS = {"forward": slice(0, 3), "backward_data": slice(3, 6), "backward_weights": slice(6, 9)}
FUSED, NONFUSED = slice(9, 12), slice(12, 16)
LEAST_TENSOR_CHANNELS = 8  # an image's three channels do not fill a matrix instruction; cuDNN takes plain cores
_PIECE = 8192  # calls at once: their features stay in the CPU's cache
_FASTEST = 0.75  # of the rate of matrix units: DeepBench's fastest convolutions on V100 (T4, short of power: 0.65)
# flop an SM makes in a clock of such that narrow loads feed, in fp16 and TF32: the class scores (324 and 486 filters)
# of SSD on A100, A6000 and H100 (Lambda); plain GEMMs make half as many again
_UNALIGNED_FLOPS = 280.0
_TURNED_SHARE = 0.82  # of the sheet's DRAM rate
_TURNED_PER_CLOCK = 1.4  # elements of an SM: ResNet-50 in fp16 on A100 with PyTorch 1.7 and 1.9 (Lambda)
_FEW_CHANNELS = 64  # up to which the heuristic takes what a search finds
# time of what the heuristic picks over that of the fastest, where Winograd does not apply and tensor cores do not
# compute (`implicit_convolve_sgemm`, `dgrad_engine`): 1.34 forwards and 1.38 for data in the ResNet-50 trace of V100
_UNSEARCHED = 1.36

# time of strided data gradients in fp16 on plain cores over fp32's, of 1x1 and of larger windows: DeepBench's on P100
_STRIDED_HALF_DATA = (6.9, 3.0)


@dataclass(frozen=True, slots=True)
class ConvParameters(ArrayRecord):
    """Weights per device (fp32 and tensor cores), pooled ones for other devices, spreads, and the fitted range."""

    chips: Chips
    plain: FloatArray
    tensor: FloatArray
    pooled_plain: FloatArray
    pooled_tensor: FloatArray
    sigma: FloatArray
    unseen_sigma: float
    limits: FloatArray  # largest batch, channels, filters, height

    def weights(self, device: Device) -> tuple[FloatArray, FloatArray]:
        """(fp32, tensor core) weights that hold for this device: its chip's, else those of chips of its generation."""
        row = self.chips.find(device)
        rows = [row] if row >= 0 else self.chips.list_kin(device)
        return (
            (self.plain[rows].mean(0), self.tensor[rows].mean(0)) if rows else (self.pooled_plain, self.pooled_tensor)
        )

    def factor_outside(self, g: Geometry) -> FloatArray:
        """How many times the farthest size of a call is larger than what was fitted; 1 inside."""
        sizes = np.stack([g.batch, g.channels, g.filters, g.height], axis=1)
        return np.asarray(np.maximum((sizes / self.limits).max(axis=1), 1.0))


def estimate_algorithm_seconds(
    parameters: ConvParameters, calls: Calls, g: Geometry, device: Device, tensor: BoolArray
) -> FloatArray:
    """Seconds by each way, [calls, 3]; infinite where a way does not apply."""
    plain, fast = parameters.weights(device)
    rate = get_conv_flop_rates(calls, device, tensor)
    blocks = compute_algorithm_features(calls, g, device, rate)
    per_gemm = np.where(tensor[:, None], fast[:9], plain[:9])
    direct = np.zeros(len(calls))
    for kind, columns in GEMM_COLUMNS.items():
        mine = calls.is_kind(kind)
        direct[mine] = (blocks[0][mine] * per_gemm[mine, columns]).sum(axis=1)
    if device.multiplying_gain > 1.0:  # units that wait for their own sums, see the GEMMs
        slower = np.where(g.taps == 1, device.multiplying_gain, 1.0)
        waiting = g.flops * slower / (WAITING_SHARE * rate * device.num_sms)
        direct = np.where(tensor, np.maximum(direct, waiting), direct)
    if device.is_capability_at_least(AMPERE):  # before, what was measured holds these
        reached = np.where(g.taps == 1, 1.0, device.multiplying_gain) * _FASTEST * rate * device.num_sms
        narrow = _UNALIGNED_FLOPS * device.num_sms * 1e6 * device.effective_clock_mhz
        most = np.where(has_unaligned_channels(g, device), np.minimum(reached, narrow), reached)
        direct = np.where(tensor, np.maximum(direct, g.flops / most), direct)
    if "fp16" not in device.peak_flops:
        strided = g.data & (g.stride > 1) & calls.is_compute("fp16")
        direct = direct * np.where(strided, np.where(g.taps == 1, *_STRIDED_HALF_DATA), 1.0)
    fused = np.where(g.winograd & ~g.weights & ~tensor, FIXED_SECONDS[0] + blocks[1] @ plain[FUSED], np.inf)
    nonfused = np.where((g.winograd | g.winograd5) & ~tensor, FIXED_SECONDS[1] + blocks[2] @ plain[NONFUSED], np.inf)
    return np.stack([direct, fused, nonfused], axis=1)


def has_unaligned_channels(g: Geometry, device: Device) -> BoolArray:
    """Convolutions whose channels or filters do not fill loads of 16 bytes: they are padded, or loaded in pieces.
    Before Ampere, that is in what was measured."""
    odd = (g.channels % LEAST_TENSOR_CHANNELS != 0) | (g.filters % LEAST_TENSOR_CHANNELS != 0)
    return np.asarray(odd & (device.vendor == "amd" or device.is_capability_at_least(AMPERE)))


def get_conv_flop_rates(calls: Calls, device: Device, tensor: BoolArray) -> FloatArray:
    """Flop/s of one SM: of its tensor cores in the call's type where `tensor`, of its plain cores elsewhere.

    The filter gradient sums over positions, along which TF32 operands are not contiguous; matrix instructions take
    such operands in 16-bit types only, so TF32 runs at half rate.
    """
    table = {name: device.get_sustained_flops(name) / device.num_sms for name in device.peak_flops}
    plain = device.get_sustained_flops("fp32") / device.num_sms
    halved = calls.is_compute("tf32") & calls.is_kind("backward_weights")
    pointwise = calls["kernel_h"] * calls["kernel_w"] == 1  # plain GEMMs; windows feed units no faster
    gain = np.where(halved, 0.5, np.where(pointwise, device.multiplying_gain, 1.0))
    return np.where(tensor, calls.per_compute(table, plain) * gain, plain)


def compute_algorithm_features(calls: Calls, g: Geometry, device: Device, rate: FloatArray) -> list[FloatArray]:
    """Seconds-like columns of every way: implicit GEMM, fused and four-kernel Winograd."""
    gemm = compute_implicit_gemm_features(g, device, rate, calls.item_bytes())
    return [
        np.concatenate([np.full((len(gemm), 1), _FIRST_COLUMN_SECONDS), gemm], axis=1),
        compute_winograd_features(g, device, rate),
        compute_nonfused_winograd_features(g, device, rate),
    ]


class ConvModel(KernelModel):
    """Forward, data gradient and filter gradient. Fitted state: `parameters_`, and `residual_` (trees)."""

    family: ClassVar[Family] = CONV
    UNMEASURED: ClassVar[float] = 0.2  # log-sigma added off 3x3 forward in fp32, where data of a chip is thin
    _DEPTHWISE: ClassVar[float] = 0.6  # log-sigma: assumed, there is no data for it

    def __init__(self, parameters: ConvParameters, residual: ConvTrees | None = None) -> None:
        self.parameters_ = parameters
        self.residual_ = residual

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        g = Geometry.of(calls, device)
        tensor = calls.is_compute(*[name for name in TENSOR_TYPES if name in device.peak_flops])
        tensor &= g.channels >= LEAST_TENSOR_CHANNELS
        by_algorithm = estimate_algorithm_seconds(self.parameters_, calls, g, device, tensor)
        seconds = by_algorithm.min(axis=1)
        row = self.parameters_.chips.find(device)
        measured = self.parameters_.chips.restore_sms(device, row)
        if measured is not device:  # trees know the rounding of tiles on the chip that was measured
            by_algorithm = estimate_algorithm_seconds(self.parameters_, calls, g, measured, tensor)
        learned = self._correct(seconds, by_algorithm, calls, g, measured, tensor)
        unsearched = ~(g.winograd | g.winograd5 | tensor | g.weights | (calls["searched"] == 1))
        unsearched &= np.minimum(g.channels, g.filters) > _FEW_CHANNELS
        seconds = np.where(unsearched, _UNSEARCHED * seconds, seconds)
        turned = np.where(tensor, np.where(has_unaligned_channels(g, device), 1.0, 1.0 - calls["channels_last"]), 0.0)
        seconds = seconds + turned * _estimate_layout_seconds(g, device, calls.item_bytes())
        if not tensor.all():  # however well trees extrapolate, Winograd's tiles save no more multiplications
            least = g.flops / (g.saved_products * device.get_peak_flops("fp32"))
            seconds = np.where(tensor, seconds, np.maximum(seconds, least))
        seconds = seconds * calls["slowness"]
        depthwise = (g.groups > 1) & (g.channels == 1)
        seconds = np.where(depthwise, 8e-6 + estimate_depthwise_seconds(g, device, calls.item_bytes()), seconds)
        direct = calls["direct"] == 1
        if direct.any():
            seconds = np.where(direct, calls["slowness"] * estimate_direct_seconds(g, device), seconds)
        sigma = np.full(len(calls), self.parameters_.unseen_sigma if row < 0 else float(self.parameters_.sigma[row]))
        sigma = np.where(learned | (row < 0), sigma, np.hypot(sigma, self.UNMEASURED))
        sigma = np.where(depthwise | direct, self._DEPTHWISE, np.hypot(sigma, 8e-6 / seconds))
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
        for rows in _split_rows(learned):
            assert chip_trees is not None
            features = compute_own_tree_features(Geometry.of(calls.take(rows)), device, ways[rows])
            seconds[rows] *= np.exp(chip_trees.predict(features))
        if trees is not None:
            for rows in _split_rows(~learned & trees.shares(calls, g, device, tensor)):
                part = calls.take(rows)
                features = compute_shared_tree_features(part, Geometry.of(part), device, ways[rows])
                seconds[rows] *= np.exp(trees.shared.predict(features))
        return learned

    def state(self) -> State:
        """Coefficients and trees."""
        assert self.residual_ is not None, "a model without trees is not kept"
        return {**self.parameters_.state(), **self.residual_.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with these coefficients and trees."""
        return cls(ConvParameters.from_state(state), ConvTrees.from_state(state))

    @staticmethod
    def _in_learned_domain(calls: Calls, g: Geometry) -> BoolArray:
        return np.asarray(g.winograd & calls.is_kind("forward") & calls.is_compute("fp32"))


def _split_rows(chosen: BoolArray) -> list[npt.NDArray[np.intp]]:
    """The chosen rows, a few thousand at a time: their features then stay in cache."""
    rows = np.flatnonzero(chosen)
    return [rows[start : start + _PIECE] for start in range(0, len(rows), _PIECE)]


def _estimate_layout_seconds(g: Geometry, device: Device, item: FloatArray) -> FloatArray:
    """Tensor-core kernels want channels last; cuDNN turns PyTorch's layout there and back, at the rate of the memory or
    of the SMs, which take elements one by one. So does MIOpen, the filters too, in kernels of their own that are mostly
    start where tensors are small; forward it clears and casts the result besides."""
    if device.vendor == "amd":
        starts = START_SECONDS * np.where(g.data | g.weights, 3.0, 5.0)
        return np.asarray(2.0 * item * g.total_size / (_TURNED_SHARE * device.dram_bandwidth) + starts)
    values = g.input_size + g.output_size
    by_sms = values / (_TURNED_PER_CLOCK * device.num_sms * 1e6 * device.effective_clock_mhz)
    return np.asarray(np.maximum(2.0 * item * values / (_TURNED_SHARE * device.dram_bandwidth), by_sms))

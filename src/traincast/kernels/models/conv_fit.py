"""The weights of the convolution physics, and how they are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.arrays import BoolArray, FloatArray
from traincast.kernels.call import Calls
from traincast.kernels.models.base import Measurements, State
from traincast.kernels.models.chips import Chips
from traincast.kernels.models.conv_physics import Geometry, gemm_features, nonfused_features, winograd_features
from traincast.kernels.models.solve import relative_fit
from traincast.platform.device import Device

_FIXED = (8e-6, 14e-6)  # seconds of the small helper kernels and the first loads of either Winograd
_FIXED_UNIT = 10e-6  # of the implicit GEMM's first column
# columns of the weights: implicit GEMM forward, data, filters (3 each); fused (3) and four-kernel Winograd (4)
_GEMM = {"forward": slice(0, 3), "backward_data": slice(3, 6), "backward_weights": slice(6, 9)}
_FUSED, _NONFUSED = slice(9, 12), slice(12, 16)
_START = np.array([1.5, 1.0, 0.6, 2.0, 1.2, 0.6, 2.0, 1.0, 1.2, 1.35, 0.6, 3.0, 1.1, 2.0, 3.0, 5.0])
_MODEL_ERROR = 0.05
_ROUNDS = 8
_TIE = 0.002  # how strongly a device is tied to the pooled weights, against its own rows


@dataclass(frozen=True, slots=True)
class ConvParameters:
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
        """(fp32, tensor core) weights that hold for this device."""
        row = self.chips.find(device)
        return (self.pooled_plain, self.pooled_tensor) if row < 0 else (self.plain[row], self.tensor[row])

    def within(self, g: Geometry) -> BoolArray:
        """Which calls are no larger than what was fitted."""
        sizes = np.stack([g.batch, g.channels, g.filters, g.height], axis=1)
        return np.asarray((sizes <= self.limits).all(axis=1))

    def with_spread(self, sigma: FloatArray, unseen_sigma: float) -> ConvParameters:
        """The same weights with these spreads."""
        return replace(self, sigma=sigma, unseen_sigma=unseen_sigma)

    def state(self) -> State:
        """As arrays."""
        arrays = ("plain", "tensor", "pooled_plain", "pooled_tensor", "sigma", "limits")
        return {
            **self.chips.state(),
            **{name: getattr(self, name) for name in arrays},
            "unseen_sigma": np.array([self.unseen_sigma]),
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> ConvParameters:
        """Read back from arrays."""
        names = ("plain", "tensor", "pooled_plain", "pooled_tensor", "sigma", "limits")
        arrays = {name: np.asarray(state[name], dtype=np.float64) for name in names}
        return ConvParameters(chips=Chips.from_state(state), unseen_sigma=float(state["unseen_sigma"][0]), **arrays)


def algorithm_seconds(
    parameters: ConvParameters, calls: Calls, g: Geometry, device: Device, tensor: BoolArray
) -> FloatArray:
    """Seconds by each way, [calls, 3]; infinite where a way does not apply."""
    plain, fast = parameters.weights(device)
    rate = _rate(calls, device, tensor)
    blocks = _features(calls, g, device, rate)
    per_gemm = np.where(tensor[:, None], fast[:9], plain[:9])
    direct = np.zeros(len(calls))
    for kind, columns in _GEMM.items():
        mine = calls.is_kind(kind)
        direct[mine] = (blocks[0][mine] * per_gemm[mine, columns]).sum(axis=1)
    fused = np.where(g.winograd & ~g.weights & ~tensor, _FIXED[0] + blocks[1] @ plain[_FUSED], np.inf)
    nonfused = np.where((g.winograd | g.winograd5) & ~tensor, _FIXED[1] + blocks[2] @ plain[_NONFUSED], np.inf)
    return np.stack([direct, fused, nonfused], axis=1)


def fit_weights(data: Measurements) -> ConvParameters:
    """Weights by alternating: give every row to its fastest way, refit the ways to their rows."""
    tensor_row = data.calls.is_compute("tf32", "fp16", "bf16", "fp8")
    plain_pool = _pooled(data, ~tensor_row, _START)
    tensor_pool = _pooled(data, tensor_row, plain_pool) if tensor_row.any() else plain_pool
    plain, tensor = [], []
    for index in range(len(data.devices)):
        mine = data.device == index
        plain.append(_refined(data, mine & ~tensor_row, plain_pool))
        tensor.append(_refined(data, mine & tensor_row, tensor_pool))
    size = len(data.devices)
    g = Geometry.of(data.calls)
    limits = np.array([part.max() for part in (g.batch, g.channels, g.filters, g.height)])
    spread = np.full(size, 0.15)
    return ConvParameters(
        Chips.of(data.devices), np.array(plain), np.array(tensor), plain_pool, tensor_pool, spread, 0.3, limits
    )


def certainty(data: Measurements) -> FloatArray:
    """Weight of a row's relative error: the model itself is good to some 5 %."""
    noise = np.broadcast_to(np.asarray(data.noise_seconds, dtype=np.float64), data.seconds.shape)
    return np.asarray(1.0 / np.hypot(_MODEL_ERROR, noise / data.seconds))


def _rate(calls: Calls, device: Device, tensor: BoolArray) -> FloatArray:
    """Flop/s of one SM: of its tensor cores in the call's type where `tensor`, of its plain cores elsewhere.

    The filter gradient sums over positions, along which TF32 operands are not contiguous; matrix instructions take
    such operands in 16-bit types only, so TF32 runs at half rate.
    """
    table = {name: device.sustained(name) / device.num_sms for name in device.peak_flops}
    plain = device.sustained("fp32") / device.num_sms
    halved = calls.is_compute("tf32") & calls.is_kind("backward_weights")
    return np.where(tensor, calls.per_compute(table, plain) * np.where(halved, 0.5, 1.0), plain)


def _features(calls: Calls, g: Geometry, device: Device, rate: FloatArray) -> list[FloatArray]:
    gemm = gemm_features(g, device, rate, calls.item_bytes())
    return [
        np.concatenate([np.full((len(gemm), 1), _FIXED_UNIT), gemm], axis=1),
        winograd_features(g, device, rate),
        nonfused_features(g, device, rate),
    ]


def _pooled(data: Measurements, use: BoolArray, start: FloatArray) -> FloatArray:
    """Weights shared by all devices, every device counting alike."""
    groups = [np.flatnonzero(use & (data.device == i)) for i in range(len(data.devices))]
    groups = [rows for rows in groups if len(rows)]
    order = np.concatenate(groups)
    share = np.concatenate([np.full(len(rows), 1.0 / np.sqrt(len(rows))) for rows in groups])
    return _alternate(data, order, share, start, tie=0.0)


def _refined(data: Measurements, use: BoolArray, pooled: FloatArray) -> FloatArray:
    rows = np.flatnonzero(use)
    return _alternate(data, rows, np.ones(len(rows)), pooled, tie=_TIE) if len(rows) else pooled


def _alternate(
    data: Measurements, rows: npt.NDArray[np.intp], share: FloatArray, start: FloatArray, tie: float
) -> FloatArray:
    calls, seconds = data.calls.take(rows), data.seconds[rows]
    g = Geometry.of(calls)
    parts = [np.zeros((len(rows), width)) for width in (3, 3, 4)]
    for index in np.unique(data.device[rows]):
        mine = data.device[rows] == index
        some, device = calls.take(mine), data.devices[int(index)]
        rate = _rate(some, device, some.is_compute("tf32", "fp16", "bf16", "fp8"))
        for part, block in zip(parts, _features(some, Geometry.of(some), device, rate), strict=True):
            part[mine] = block
    sure = share * certainty(data)[rows]
    weights = start.copy()
    for _ in range(_ROUNDS):
        way = _fastest(calls, g, parts, weights)
        jobs = [(way == 0) & calls.is_kind(kind) for kind in _GEMM] + [way == 1, way == 2]
        columns = [*_GEMM.values(), _FUSED, _NONFUSED]
        blocks = [parts[0]] * 3 + [parts[1], parts[2]]
        fixed = [0.0] * 3 + list(_FIXED)
        for job, column, block, constant in zip(jobs, columns, blocks, fixed, strict=True):
            if job.sum() >= 20:
                weights[column] = _tied_fit(block[job], seconds[job], sure[job], constant, start[column], tie)
    return weights


def _fastest(calls: Calls, g: Geometry, parts: list[FloatArray], weights: FloatArray) -> npt.NDArray[np.int64]:
    direct = np.zeros(len(calls))
    for kind, columns in _GEMM.items():
        mine = calls.is_kind(kind)
        direct[mine] = parts[0][mine] @ weights[columns]
    fused = np.where(g.winograd & ~g.weights, _FIXED[0] + parts[1] @ weights[_FUSED], np.inf)
    nonfused = np.where(g.winograd | g.winograd5, _FIXED[1] + parts[2] @ weights[_NONFUSED], np.inf)
    return np.asarray(np.argmin(np.stack([direct, fused, nonfused]), axis=0))


def _tied_fit(
    block: FloatArray, seconds: FloatArray, sure: FloatArray, constant: float, prior: FloatArray, tie: float
) -> FloatArray:
    """Non-negative weights near `prior`: one made-up row a weight, as heavy as `tie` of the real ones."""
    known = np.flatnonzero(prior > 0) if tie else np.zeros(0, dtype=np.intp)
    made_up = np.zeros((len(known), block.shape[1]))
    made_up[np.arange(len(known)), known] = 1.0 / prior[known]
    pull = np.sqrt(tie * float(np.sum(sure**2)))
    return relative_fit(
        np.concatenate([block, made_up]),
        np.concatenate([seconds, np.ones(len(known))]),
        base=np.concatenate([np.full(len(seconds), constant), np.zeros(len(known))]),
        weight=np.concatenate([sure, np.full(len(known), pull)]),
        knee=0.1,
    )

"""The weights of the convolution physics, and the seconds of every way to compute that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.conv.physics import Geometry, gemm_features, nonfused_features, winograd_features
from traincast.costs.kernels.model import State
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray

TENSOR_TYPES = ("tf32", "fp16", "bf16", "fp8")
"""Types that tensor cores multiply."""
FIXED_SECONDS = (8e-6, 14e-6)  # seconds of the small helper kernels and the first loads of either Winograd
_FIRST_COLUMN_SECONDS = 10e-6  # of the implicit GEMM's first column
# columns of the weights: implicit GEMM forward, data, filters (3 each); fused (3) and four-kernel Winograd (4)
GEMM_COLUMNS = {"forward": slice(0, 3), "backward_data": slice(3, 6), "backward_weights": slice(6, 9)}
FUSED, NONFUSED = slice(9, 12), slice(12, 16)


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

    def factor_outside(self, g: Geometry) -> FloatArray:
        """How many times the farthest size of a call is larger than what was fitted; 1 inside."""
        sizes = np.stack([g.batch, g.channels, g.filters, g.height], axis=1)
        return np.asarray(np.maximum((sizes / self.limits).max(axis=1), 1.0))

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
    rate = flop_rates(calls, device, tensor)
    blocks = way_features(calls, g, device, rate)
    per_gemm = np.where(tensor[:, None], fast[:9], plain[:9])
    direct = np.zeros(len(calls))
    for kind, columns in GEMM_COLUMNS.items():
        mine = calls.is_kind(kind)
        direct[mine] = (blocks[0][mine] * per_gemm[mine, columns]).sum(axis=1)
    fused = np.where(g.winograd & ~g.weights & ~tensor, FIXED_SECONDS[0] + blocks[1] @ plain[FUSED], np.inf)
    nonfused = np.where((g.winograd | g.winograd5) & ~tensor, FIXED_SECONDS[1] + blocks[2] @ plain[NONFUSED], np.inf)
    return np.stack([direct, fused, nonfused], axis=1)


def flop_rates(calls: Calls, device: Device, tensor: BoolArray) -> FloatArray:
    """Flop/s of one SM: of its tensor cores in the call's type where `tensor`, of its plain cores elsewhere.

    The filter gradient sums over positions, along which TF32 operands are not contiguous; matrix instructions take
    such operands in 16-bit types only, so TF32 runs at half rate.
    """
    table = {name: device.sustained(name) / device.num_sms for name in device.peak_flops}
    plain = device.sustained("fp32") / device.num_sms
    halved = calls.is_compute("tf32") & calls.is_kind("backward_weights")
    return np.where(tensor, calls.per_compute(table, plain) * np.where(halved, 0.5, 1.0), plain)


def way_features(calls: Calls, g: Geometry, device: Device, rate: FloatArray) -> list[FloatArray]:
    """Seconds-like columns of every way: implicit GEMM, fused and four-kernel Winograd."""
    gemm = gemm_features(g, device, rate, calls.item_bytes())
    return [
        np.concatenate([np.full((len(gemm), 1), _FIRST_COLUMN_SECONDS), gemm], axis=1),
        winograd_features(g, device, rate),
        nonfused_features(g, device, rate),
    ]

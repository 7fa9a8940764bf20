"""What trees have learned of the time of convolutions beyond physics.

Boosted symmetric trees, small enough to keep as arrays and fast enough to ask a million times: every node of one level
tests the same feature against the same threshold, so that a row's leaf is a number made of a few comparisons. Beyond
the data a tree is constant: what it corrects keeps the trend of the physics below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.conv.physics import Geometry, estimate_forward_tile_seconds
from traincast.costs.kernels.model import Chips, State
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

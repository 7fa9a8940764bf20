"""Kernels that stream memory: element-wise, copies, reductions, pooling, indexing, transfers.

All of them share one memory system, whose shares of the sheet's DRAM rate are fitted to element-wise measurements. A
family only says how many bytes and lane cycles a call costs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import (
    Calls,
    Chips,
    Estimate,
    Family,
    ParametricModel,
    State,
    get_bus_gain,
    get_pinned_rate,
)
from traincast.costs.kernels.streaming import COPY, ELEMENTWISE, INDEX, MEMCPY, POOL, REDUCTION
from traincast.costs.kernels.streaming.physics import (
    INTEGER_LANES,
    START_SECONDS,
    START_SPREAD,
    MemorySystem,
    estimate_lane_seconds,
    estimate_overlap_seconds,
)
from traincast.hardware.device import VOLTA, Device
from traincast.utils.arrays import BoolArray, FloatArray

# lane cycles per element: instruction counts of the compiled kernels, to the nearest handful. Only `pow` ever limits
# a measured kernel, and is fitted; the others matter when the data sits in L2.
_CYCLES = {
    "add": 2, "mul": 2, "div": 8, "tanh": 20, "relu": 2, "gelu": 25, "exp": 12, "copy": 2, "fill": 1,
    "dropout": 30, "compare": 2, "optimizer": 20, "loss": 20,
}  # fmt: skip
# seconds before anything moves, where they differ from `START_SECONDS`: medians of the smallest kernels of each kind in
# the V100 and A100 traces. A fill waits for no load; special functions, casts and offsets are more code to fetch.
_STARTS = {
    "fill": 2.3e-6, "tanh": 3.5e-6, "gelu": 3.5e-6, "exp": 3.5e-6, "dropout": 3.5e-6, "loss": 4.5e-6, "copy": 4e-6,
    "strided": 4e-6,
}  # fmt: skip
_OFFSET_CYCLES = 20.0  # an element's place in one of up to three such operands: integer divisions by multiplication
_MOST_OFFSETS = 3.0  # operands whose offsets ATen's kernels compute: two inputs and a result
_UNMEASURED = 0.25  # log-sigma added where only the physics speaks for a kind or type of kernel
_HALF = (
    0.1  # the same for fitted kinds in 16 bits: 4096 rows of 4096 to 16384 in bf16 on H100 are within 4 % (liger_ops)
)
_BEYOND = 0.01  # and for every doubling beyond the measured sizes: the DRAM rate holds, see docs/evidence/kernels.md


@dataclass(frozen=True, slots=True)
class DeviceView:
    """The parameters that hold for one device. `known` when it, or a card with its chip, was measured."""

    memory: MemorySystem
    pow_cycles: float
    sigma: float
    known: bool


@dataclass(frozen=True, slots=True)
class StreamParameters:
    """Fitted state: per device read share, write share, cycles of `pow`, log-sigma; and what all devices share.

    `pooled` holds (read share, write share) for GDDR and for stacked memory, then the cycles of `pow` for NVIDIA
    and AMD; `unseen_sigma` is the spread of a device known from its sheet only.
    """

    chips: Chips
    devices: FloatArray
    pooled: FloatArray
    l2: FloatArray  # bytes per clock and SM; share of the L2
    unseen_sigma: float
    most_bytes: float

    def view(self, device: Device) -> DeviceView:
        """What holds for this device."""
        row = self.chips.find(device)
        stacked = int(device.made_for_computing)
        read, write = get_bus_gain(device) * self.pooled[2 * stacked : 2 * stacked + 2]
        cycles, sigma = self.pooled[4 + (device.vendor == "amd")], self.unseen_sigma
        if row >= 0:
            read, write, cycles, sigma = self.devices[row]
        memory = MemorySystem.of(device, float(read), float(write), float(self.l2[0]), float(self.l2[1]))
        return DeviceView(memory, float(cycles), float(sigma), row >= 0)

    def state(self) -> State:
        """As arrays."""
        return {
            **self.chips.state(),
            "devices": self.devices,
            "pooled": self.pooled,
            "l2": self.l2,
            "scalars": np.array([self.unseen_sigma, self.most_bytes]),
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> StreamParameters:
        """Read back from arrays."""
        return StreamParameters(
            Chips.from_state(state),
            np.asarray(state["devices"], dtype=np.float64),
            np.asarray(state["pooled"], dtype=np.float64),
            np.asarray(state["l2"], dtype=np.float64),
            *(float(value) for value in state["scalars"]),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What calls ask of the device: bytes through memory, lane cycles, seconds before anything moves."""

    bytes_read: FloatArray
    bytes_written: FloatArray
    lane_cycles: FloatArray
    start_seconds: FloatArray | float
    measured: BoolArray  # kinds whose time was fitted, rather than derived


class StreamingModel(ParametricModel[StreamParameters]):
    """Base of the streaming families. Fitted state: `parameters_`."""

    parameters = StreamParameters

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        parameters = self.parameters_
        view = parameters.view(device)
        work = self.work(calls, device, view.pow_cycles)
        memory = view.memory.seconds(work.bytes_read, work.bytes_written)
        seconds = work.start_seconds + estimate_overlap_seconds(memory, estimate_lane_seconds(device, work.lane_cycles))
        fitted = work.measured & calls.is_compute("fp32")
        half = work.measured & calls.is_compute("fp16", "bf16")
        spread = np.hypot(view.sigma, np.select([fitted, half], [0.0, _HALF], _UNMEASURED))
        factor = np.maximum((work.bytes_read + work.bytes_written) / parameters.most_bytes, 1.0)
        beyond = np.log2(factor)
        sigma = np.hypot(np.hypot(spread, _BEYOND * beyond), START_SPREAD * START_SECONDS / seconds)
        known = np.full(len(calls), view.known)
        return Estimate(seconds, sigma, fitted & (beyond == 0.0) & known, np.where(fitted, factor, 1.0), ~known)

    def memory(self, device: Device) -> MemorySystem:
        """The memory system of this device as fitted."""
        return self.parameters_.view(device).memory

    @abstractmethod
    def work(self, calls: Calls, device: Device, pow_cycles: float) -> Work:
        """What the calls cost."""


class ElementwiseModel(StreamingModel):
    """Element-wise kernels, optimizer updates and losses: every byte once."""

    family: ClassVar[Family] = ELEMENTWISE

    def work(self, calls: Calls, device: Device, pow_cycles: float) -> Work:
        """Bytes as the call says; cycles by its arithmetic class, or for the offsets of unlike operands."""
        cycles = np.array([_CYCLES.get(kind, pow_cycles) for kind in self.family.kinds])[calls.kind]
        start = np.array([_STARTS.get(kind, START_SECONDS) for kind in self.family.kinds])[calls.kind]
        fitted = calls.is_kind("add", "mul", "div", "pow", "tanh", "relu", "gelu")
        offsets = _OFFSET_CYCLES * np.minimum(calls["tensors"], _MOST_OFFSETS)
        cycles = np.where(calls.is_kind("strided"), offsets, cycles)
        return Work(calls["bytes_read"], calls["bytes_written"], cycles * calls["elements"], start, fitted)


class CopyModel(StreamingModel):
    """Concatenation and layout copies: streams that reach less of the DRAM rate."""

    family: ClassVar[Family] = COPY
    _SHARE: ClassVar[dict[str, float]] = {
        "cat": 0.86,  # the two papers measured concatenation at 0.79 of peak, element-wise reaches 0.92
        "layout": 0.80,  # one side of a transposing copy touches sectors it only half uses
    }
    _TENSOR_SECONDS: ClassVar[float] = 0.3e-6  # concatenating 2, 8 and 26 small tensors takes 3.1, 5.4 and 10.8 us

    def work(self, calls: Calls, device: Device, pow_cycles: float) -> Work:
        """Bytes stretched by what the access pattern wastes; offsets cost integer arithmetic."""
        share = np.array([self._SHARE[kind] for kind in self.family.kinds])[calls.kind]
        return Work(
            calls["bytes_read"] / share,
            calls["bytes_written"] / share,
            25.0 * calls["elements"],
            START_SECONDS + self._TENSOR_SECONDS * np.maximum(calls["tensors"] - 2.0, 0.0),
            np.zeros(len(calls), dtype=np.bool_),
        )


class ReductionModel(StreamingModel):
    """Sums and the like: one read of the input, then a tree over blocks through global memory."""

    family: ClassVar[Family] = REDUCTION
    # smallest kernels of the V100 and A100 traces
    _START: ClassVar[dict[str, float]] = {"inner": 4e-6, "outer": 5.5e-6, "full": 5e-6}
    _MEETING: ClassVar[float] = 3.5e-6  # blocks that share a result meet in memory
    _ONE_BLOCK: ClassVar[float] = 8192.0  # elements up to which one block reduces everything
    _CHAIN: ClassVar[float] = 0.25e-6  # a thread of a column sum adds 64 rows' worth, one load behind the other
    _CHAIN_ROWS: ClassVar[float] = 2048.0  # more rows are split over blocks
    # of a block of 512 threads, 4 of which an SM holds, from its begin to its store, however little it adds: means over
    # 64 channels in SAM on A100, bf16 and fp32; sums of four in a Transformer on another A100 took no part (+9 %)
    _BLOCK_CYCLES: ClassVar[float] = 3200.0

    def work(self, calls: Calls, device: Device, pow_cycles: float) -> Work:
        """Bytes once at 0.9 of the streaming rate, after the latencies of loads that follow each other."""
        start = np.array([self._START[kind] for kind in self.family.kinds])[calls.kind]
        rows = calls["elements"] / np.maximum(calls["outputs"], 1.0)
        chain = self._CHAIN * np.minimum(rows, self._CHAIN_ROWS) / 64.0
        collective = np.where(calls["elements"] > self._ONE_BLOCK, self._MEETING, 0.0)
        waiting = np.where(calls.is_kind("outer"), chain, np.where(calls.is_kind("full"), collective, 0.0))
        # PyTorch gives a row to a warp, or to as many lanes as it has elements
        lanes = np.where(calls.is_kind("inner") & (rows >= 2.0), np.exp2(np.floor(np.log2(np.clip(rows, 1, 32)))), 0.0)
        blocks = calls["outputs"] * lanes / 512.0 * (device.vendor == "nvidia")
        held = blocks * self._BLOCK_CYCLES / 4.0 * device.cores_per_sm
        return Work(
            calls["bytes_read"] / 0.9,
            calls["bytes_written"] / 0.9,
            np.maximum(4.0 * calls["elements"], held),
            start + waiting,
            np.zeros(len(calls), dtype=np.bool_),
        )


class PoolModel(StreamingModel):
    """Pooling: a stencil forwards; backwards each input element searches the windows that cover it."""

    family: ClassVar[Family] = POOL

    def work(self, calls: Calls, device: Device, pow_cycles: float) -> Work:
        """Bytes once; window reads hit the cache, so they cost cycles only."""
        backward = calls.is_kind("backward")
        # index arithmetic with integer divisions: 6 cycles per window entry forwards; backwards about 250 per element,
        # on an SM's integer lanes since Volta 175 (195 for windows of 3 on V100, 158 for those of 2 on H100)
        divided = 250.0
        if device.vendor == "nvidia" and device.is_capability_at_least(VOLTA):
            divided = 175.0 * device.cores_per_sm / INTEGER_LANES
        cycles = np.where(backward, divided, 20.0 + 6.0 * calls["window"]) * calls["elements"]
        return Work(
            calls["bytes_read"] / 0.9,
            calls["bytes_written"] / 0.9,
            cycles,
            START_SECONDS,
            np.zeros(len(calls), dtype=np.bool_),
        )


class IndexModel(StreamingModel):
    """Gathers, scatters, sorts and accumulating index writes."""

    family: ClassVar[Family] = INDEX
    _SECTOR_BYTES: ClassVar[float] = 32.0  # the least that NVIDIA's L2 and DRAM move
    _START: ClassVar[dict[str, float]] = {  # smallest kernels of the traces: an index, then what it points at
        "gather": 5.5e-6, "scatter": 5.5e-6, "put": 5.5e-6, "sort": 11.5e-6,
    }  # fmt: skip

    def work(self, calls: Calls, device: Device, pow_cycles: float) -> Work:
        """Rows are fetched in whole sectors; atomics and index arithmetic cost cycles, warps cost latency."""
        row_bytes = np.maximum(calls["row_elements"], 1.0) * calls.item_bytes()
        waste = np.ceil(row_bytes / self._SECTOR_BYTES) * self._SECTOR_BYTES / row_bytes
        gather, scatter = calls.is_kind("gather"), calls.is_kind("scatter")
        elements, rows = calls["elements"], calls["elements"] / np.maximum(calls["row_elements"], 1.0)
        read = calls["bytes_read"] * np.where(gather, np.minimum(waste, 4.0), 1.0) / 0.85
        written = calls["bytes_written"] * np.where(scatter, np.minimum(waste, 4.0), 1.0) / 0.85
        # an atomic holds its lane for about two L2 round trips divided by what an SM keeps in flight
        cycles = np.select([gather, scatter], [20.0 * elements + 100.0 * rows, 130.0 * elements], 10.0 * elements)
        # index_put accumulates with one warp per row: five dependent loads of 440 cycles, 48 warps in flight per SM
        warp_cycles = 5 * 440.0 / 48.0 * np.maximum(1.0, np.ceil(calls["row_elements"] / 128.0))
        put = calls.is_kind("put")
        cycles = np.where(put, rows * warp_cycles * device.cores_per_sm, cycles)
        start = np.array([self._START[kind] for kind in self.family.kinds])[calls.kind]
        return Work(read, written, cycles, start, np.zeros(len(calls), dtype=np.bool_))


class MemcpyModel(StreamingModel):
    """Copies by the copy engines, over PCIe or inside the device, and memset."""

    family: ClassVar[Family] = MEMCPY
    # bound by the host's own copy; assumed
    _PAGEABLE_RATE: ClassVar[dict[int, float]] = {3: 6e9, 4: 8e9, 5: 10e9}
    _STAGED_BYTES: ClassVar[float] = float(1 << 20)  # a pageable copy this small leaves the staging buffer in one go

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Transfers run at the link's rate; copies inside the device stream memory."""
        inside = super().predict(calls, device)
        link = calls.is_kind("h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable")
        pageable = calls.is_kind("h2d_pageable", "d2h_pageable")
        generation = min(max(device.pcie_gen, 3), 5)
        pinned = get_pinned_rate(device)
        staged = min(self._PAGEABLE_RATE[generation], pinned)
        size = calls["bytes"]
        late = np.where(pageable, np.maximum(size - self._STAGED_BYTES, 0.0), 0.0)
        crossing = 1.5e-6 + (size - late) / pinned + late / staged
        seconds = np.where(link, crossing, inside.seconds)
        sigma = np.where(link, np.where(pageable, 0.35, 0.15), inside.sigma)
        spread = np.hypot(sigma, START_SPREAD * 1e-6 / seconds)
        return replace(inside, seconds=seconds, sigma=spread, in_domain=inside.in_domain & ~link)

    def work(self, calls: Calls, device: Device, pow_cycles: float) -> Work:
        """A device copy reads and writes every byte, memset only writes."""
        memset = calls.is_kind("memset")
        read, start = np.where(memset, 0.0, calls["bytes"]), np.where(memset, 1.2e-6, START_SECONDS)
        return Work(read, calls["bytes"], np.zeros(len(calls)), start, np.zeros(len(calls), dtype=np.bool_))

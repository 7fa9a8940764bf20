"""Fits the memory system that all streaming kernels share to element-wise measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import Calls, Chips
from traincast.costs.kernels.streaming.model import ElementwiseModel, StreamParameters
from traincast.costs.kernels.streaming.physics import (
    START_SECONDS,
    MemorySystem,
    estimate_lane_seconds,
    estimate_overlap_seconds,
)
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import Z90
from traincast_evaluation.kernels.fit import UNJUDGED_SPREAD, ModelTraining, compute_device_spreads, leave_one_chip_out
from traincast_evaluation.kernels.samples import Measurements
from traincast_evaluation.kernels.streaming.measurements import FILES, SOURCE, VectorSamples, read_vectors
from traincast_evaluation.measured_tables import select_held_out
from traincast_evaluation.solve import fit_relative

_BYTES_PER_CLOCK = (10.0, 13.0, 16.0, 20.0, 24.0, 32.0)  # of an SM from its L2, tried; 64 is the width of its port
_L2_SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)  # of the L2 that one kernel's data can occupy, tried
_TELLING_SECONDS = 20e-6  # to fill an L2 from DRAM; smaller ones are over before the host's part is
_LONG_SECONDS = 150e-6  # shorter kernels are measured before the clock has risen, which only arithmetic feels
_POW_CYCLES = np.geomspace(5.0, 400.0, 60)  # tried, 8 % apart
_LEAST_SPREAD = 0.005  # log-sigma: set by hand, no card is claimed to be known better


def fit_elementwise(data: Measurements) -> ElementwiseModel:
    """The model of element-wise device times, whose memory system all streaming kernels share. Deterministic."""
    return ElementwiseModel(fit_streams(data))


def fit_streams(data: Measurements) -> StreamParameters:
    """Per device, the DRAM shares from what is far larger than the L2; then `pow`; then, for all, the L2.

    Spreads are left at a placeholder; `with_spread` sets them from points the fit has not seen.
    """
    devices, order = list(data.devices), range(len(data.devices))
    rows = [np.flatnonzero(data.device == i) for i in order]
    shares = np.array(
        [_dram_shares(data.calls.take(r), data.seconds[r], d) for r, d in zip(rows, devices, strict=True)]
    )
    pooled = _pool(devices, shares)
    l2 = _fit_l2(data, rows, shares)
    table = np.zeros((len(devices), 4))
    for i in order:
        memory = MemorySystem.of(devices[i], shares[i, 0], shares[i, 1], l2[0], l2[1])
        table[i] = (*shares[i], _fit_pow(data.calls.take(rows[i]), data.seconds[rows[i]], devices[i], memory), 0.02)
    amd = np.array([device.vendor == "amd" for device in devices])
    cycles = [np.median(table[amd == vendor, 2]) if (amd == vendor).any() else 60.0 for vendor in (False, True)]
    most = float(np.max(data.calls["bytes_read"] + data.calls["bytes_written"]))
    return StreamParameters(Chips.of(devices), table, np.array([*pooled, *cycles]), np.array(l2), 0.10, most)


def _dram_shares(calls: Calls, seconds: FloatArray, device: Device) -> tuple[float, float]:
    footprint = calls["bytes_read"] + calls["bytes_written"]
    use = ~calls.is_kind("pow") & (footprint > 1.5 * device.l2_bytes) & (seconds > 4 * START_SECONDS)
    if not use.any():
        raise TraincastError(
            f"no element-wise measurement of '{device.name}' is larger than 1.5 x its L2 and longer than "
            f"{4e6 * START_SECONDS:.0f} us; measure larger shapes, or leave the device out"
        )
    features = np.stack([calls["bytes_read"][use], calls["bytes_written"][use]], axis=1) / device.dram_bandwidth
    target = seconds[use] - START_SECONDS
    inverse = fit_relative(features, target)
    if inverse[1] < 1.0:  # writes cannot outrun the sheet; what they seemed to gain belongs to the reads
        inverse = np.array([fit_relative(features[:, :1], target - features[:, 1])[0], 1.0])
    return float(1 / inverse[0]), float(1 / inverse[1])


def _pool(devices: list[Device], shares: FloatArray) -> list[float]:
    stacked = np.array([device.made_for_computing for device in devices])
    pooled: list[float] = []
    for kind in (False, True):
        chosen = shares[stacked == kind] if (stacked == kind).any() else shares
        # an unseen device gets one share for both directions: how they differ is a trait of the single card
        both = 2.0 / (1.0 / chosen[:, 0] + 1.0 / chosen[:, 1])
        pooled += [float(np.median(both))] * 2
    return pooled


def _fit_l2(data: Measurements, rows: list[npt.NDArray[np.intp]], shares: FloatArray) -> tuple[float, float]:
    """Only footprints near the L2's size tell, and only of an L2 that takes longer to fill than the host to launch."""
    best, chosen = np.inf, (16.0, 0.9)
    for per_clock in _BYTES_PER_CLOCK:
        for share in _L2_SHARES:
            loss = 0.0
            for i, device in enumerate(data.devices):
                if device.l2_bytes < _TELLING_SECONDS * device.dram_bandwidth:
                    continue
                calls, seconds = data.calls.take(rows[i]), data.seconds[rows[i]]
                footprint = calls["bytes_read"] + calls["bytes_written"]
                near = (footprint > 0.4 * device.l2_bytes) & (footprint < 1.5 * device.l2_bytes) & ~calls.is_kind("pow")
                near &= seconds > 4 * START_SECONDS
                memory = MemorySystem.of(device, shares[i, 0], shares[i, 1], per_clock, share)
                predicted = START_SECONDS + memory.seconds(calls["bytes_read"][near], calls["bytes_written"][near])
                loss += float(np.sum(np.minimum(np.abs(np.log(predicted / seconds[near])), 0.5)))
            if loss < best:
                best, chosen = loss, (per_clock, share)
    return chosen


def _fit_pow(calls: Calls, seconds: FloatArray, device: Device, memory: MemorySystem) -> float:
    use = calls.is_kind("pow") & (seconds > _LONG_SECONDS)
    if not use.any():
        return 60.0
    stream = memory.seconds(calls["bytes_read"][use], calls["bytes_written"][use])
    lanes = estimate_lane_seconds(device, calls["elements"][use])
    losses = [
        np.median(np.abs(np.log((START_SECONDS + estimate_overlap_seconds(stream, cycles * lanes)) / seconds[use])))
        for cycles in _POW_CYCLES
    ]
    return float(_POW_CYCLES[int(np.argmin(losses))])


def with_spread(parameters: StreamParameters, sigma: FloatArray, unseen_sigma: float) -> StreamParameters:
    """The parameters with these spreads, one per fitted device and one for devices never measured."""
    table = parameters.devices.copy()
    table[:, 3] = sigma
    return StreamParameters(
        parameters.chips, table, parameters.pooled, parameters.l2, unseen_sigma, parameters.most_bytes
    )


class StreamTraining(ModelTraining[VectorSamples, ElementwiseModel]):
    """The memory system, from element-wise kernels."""

    profile: ClassVar[str] = "elementwise"
    sources: ClassVar[tuple[str, ...]] = (SOURCE,)
    files: ClassVar[tuple[str, ...]] = FILES

    def read(self, data: Path) -> VectorSamples:
        """All element-wise samples."""
        return read_vectors(data, "elementwise")

    def prepare(self, samples: VectorSamples, seen: BoolArray) -> VectorSamples:
        """With the host's offset of every device and op."""
        return with_offsets(samples, seen)

    def fit(self, samples: VectorSamples) -> ElementwiseModel:
        """The model of these samples."""
        return fit_elementwise(samples.measurements())

    def calibrate(self, fitted: ElementwiseModel, samples: VectorSamples, seen: BoolArray) -> ElementwiseModel:
        """Spreads from a fifth of the seen shapes, and from chips left out."""
        telling = samples.telling
        left_out = seen & select_held_out(samples.cols, samples.rows)  # another fifth: the hash depends on the order
        trial = self.fit(samples.take(seen & ~left_out & telling)).predict
        sigma = compute_device_spreads(samples, left_out & telling, trial, fitted.parameters_.chips.keys, _LEAST_SPREAD)
        return ElementwiseModel(with_spread(fitted.parameters_, sigma, self._unseen_spread(samples, seen & telling)))

    def _unseen_spread(self, samples: VectorSamples, seen: BoolArray) -> float:
        """Log-sigma for devices never measured, each predicted from those with another chip."""
        medians = []
        for index, elsewhere in leave_one_chip_out(samples, seen):
            mine = samples.take(seen & (samples.device == index))
            shown, _ = mine.predicted(self.fit(samples.take(elsewhere)).predict)
            medians.append(float(np.median(np.abs(np.log(shown / mine.seconds)))))
        # a share of a handful of devices: the largest error among them is the honest 90 % point
        return max(medians) / Z90 if medians else UNJUDGED_SPREAD

    def provenance(self, fitted: ElementwiseModel, samples: VectorSamples) -> dict[str, Any]:
        """With the families that share the memory system."""
        families = ["elementwise", "copy", "index", "reduction", "pool", "memcpy"]
        return {**super().provenance(fitted, samples), "families": families}


TRAINING = StreamTraining()


def with_offsets(samples: VectorSamples, seen: BoolArray) -> VectorSamples:
    """Samples with the host's offset of every (device, op), from the `seen` ones far larger than the L2.

    There the time is offset + start + bytes / rate, linear in all unknowns. `pow` may be bound by arithmetic, so it
    takes the median difference between floor and offset of the device's other ops.
    """
    calls = samples.calls
    read, written = calls["bytes_read"], calls["bytes_written"]
    offset = np.zeros(len(samples))
    for index, device in enumerate(samples.devices):
        mine = samples.device == index
        use = mine & seen & samples.telling & ~calls.is_kind("pow") & (read + written > 1.5 * device.l2_bytes)
        if not (use & (samples.floor > 0)).any():
            continue
        ops = np.unique(samples.op[use])
        columns = [(samples.op[use] == op) * 1e-5 for op in ops] + [read[use] / 1e12, written[use] / 1e12]
        fitted = fit_relative(np.stack(columns, axis=1).astype(np.float64), samples.seconds[use], knee=0.02)
        gaps = []
        for op, value in zip(ops, fitted, strict=False):
            group = mine & (samples.op == op)
            offset[group] = max(0.0, 1e-5 * float(value) - START_SECONDS)
            gaps.append(float(samples.floor[group][0]) - float(offset[group][0]))
        others = mine & ~np.isin(samples.op, ops)
        offset[others] = np.maximum(samples.floor[others] - float(np.median(gaps)), 0.0)
    return replace(samples, offset=offset)

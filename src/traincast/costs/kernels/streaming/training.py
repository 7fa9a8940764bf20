"""Fits the memory system that all streaming kernels share to element-wise measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from traincast.costs.kernels.solve import relative_fit
from traincast.costs.kernels.streaming.memory import START_SECONDS
from traincast.costs.kernels.streaming.model import ElementwiseModel
from traincast.costs.kernels.streaming.parameters import with_spread
from traincast.costs.kernels.streaming.vectors import FILES, SOURCE, VectorSamples, read_vectors
from traincast.costs.kernels.training import UNJUDGED_SPREAD, ModelTraining, device_spreads, leave_one_chip_out
from traincast.costs.measured_tables import held_out
from traincast.utils.arrays import BoolArray
from traincast.utils.quantiles import Z90

_LEAST_SPREAD = 0.005  # log-sigma: set by hand, no card is claimed to be known better


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
        return ElementwiseModel().fit(samples.measurements())

    def calibrate(self, fitted: ElementwiseModel, samples: VectorSamples, seen: BoolArray) -> ElementwiseModel:
        """Spreads from a fifth of the seen shapes, and from chips left out."""
        assert fitted.parameters_ is not None
        telling = samples.telling
        left_out = seen & held_out(samples.cols, samples.rows)  # another fifth: the hash depends on the order
        trial = self.fit(samples.take(seen & ~left_out & telling)).predict
        sigma = device_spreads(samples, left_out & telling, trial, fitted.parameters_.chips.keys, _LEAST_SPREAD)
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
        fitted = relative_fit(np.stack(columns, axis=1).astype(np.float64), samples.seconds[use], knee=0.02)
        gaps = []
        for op, value in zip(ops, fitted, strict=False):
            group = mine & (samples.op == op)
            offset[group] = max(0.0, 1e-5 * float(value) - START_SECONDS)
            gaps.append(float(samples.floor[group][0]) - float(offset[group][0]))
        others = mine & ~np.isin(samples.op, ops)
        offset[others] = np.maximum(samples.floor[others] - float(np.median(gaps)), 0.0)
    return replace(samples, offset=offset)

"""Fits softmax and layer norm to the NeuSight vector measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from traincast.costs.kernels.call import Calls, Estimate
from traincast.costs.kernels.model import KernelModel
from traincast.costs.kernels.rowwise.features import Features, layer_norm_features, softmax_features
from traincast.costs.kernels.rowwise.fitting import fit_rows
from traincast.costs.kernels.rowwise.model import NormModel, SoftmaxModel
from traincast.costs.kernels.rowwise.parameters import RowParameters
from traincast.costs.kernels.solve import relative_fit
from traincast.costs.kernels.streaming.memory import START_SECONDS
from traincast.costs.kernels.streaming.training import TRAINING as STREAMS
from traincast.costs.kernels.streaming.vectors import FILES, SOURCE, VectorSamples, read_vectors
from traincast.costs.kernels.training import FamilyTraining, Predictor, device_spreads, unseen_spread
from traincast.costs.measured_tables import held_out
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray

_LONGEST_HIDDEN = 30e-6  # the host is at most this far ahead of the kernel's start when it records the second event
_LEAST_SPREAD = 0.01  # log-sigma: set by hand, the residual map follows single readings closely


class RowTraining(FamilyTraining[VectorSamples, RowParameters]):
    """Forward kernels of `op`, which read a row `passes` times."""

    sources: ClassVar[tuple[str, ...]] = (SOURCE,)
    files: ClassVar[tuple[str, ...]] = FILES
    op: ClassVar[str]
    passes: ClassVar[float]
    features: Features

    def read(self, data: Path) -> VectorSamples:
        """All samples of the op."""
        return read_vectors(data, self.op)

    def prepare(self, samples: VectorSamples, seen: BoolArray) -> VectorSamples:
        """With the host's offset of every device."""
        return with_row_offsets(samples, seen, self.features)

    def fit(self, samples: VectorSamples) -> RowParameters:
        """The parameters of these samples."""
        return fit_rows(samples.measurements(), self.features, self.passes)

    def predictor(self, fitted: RowParameters) -> Predictor:
        """The measured kernel with the spread of its shape alone."""

        def predict(calls: Calls, device: Device) -> Estimate:
            sizes = calls["rows"], calls["cols"], calls.item_bytes()
            seconds, known, sigma = fitted.seconds(self.features, device, *sizes)
            return Estimate(seconds, np.full(len(calls), sigma), np.full(len(calls), known))

        return predict

    def calibrate(self, fitted: RowParameters, samples: VectorSamples, seen: BoolArray) -> RowParameters:
        """Spreads from a fifth of the seen shapes, and from chips left out."""
        telling = samples.telling
        left_out = seen & held_out(samples.cols, samples.rows)  # another fifth: the hash depends on the order
        trial = self.predictor(self.fit(samples.take(seen & ~left_out & telling)))
        sigma = device_spreads(samples, left_out & telling, trial, fitted.chips.keys, _LEAST_SPREAD)
        use = seen & telling
        return fitted.with_spread(
            sigma, unseen_spread(samples, use, use, lambda others: self.predictor(self.fit(others)))
        )


class SoftmaxTraining(RowTraining):
    """Softmax: a maximum, a sum and the quotients read a row three times."""

    profile: ClassVar[str] = "softmax"
    op: ClassVar[str] = "softmax"
    passes: ClassVar[float] = 3.0
    features = staticmethod(softmax_features)

    def model(self, fitted: RowParameters, data: Path) -> KernelModel:
        """Softmax."""
        return SoftmaxModel(fitted)


class NormTraining(RowTraining):
    """Layer norm: moments and quotients read a row twice."""

    profile: ClassVar[str] = "norm"
    op: ClassVar[str] = "ln"
    passes: ClassVar[float] = 2.0
    features = staticmethod(layer_norm_features)

    def model(self, fitted: RowParameters, data: Path) -> KernelModel:
        """Layer norm, with the memory system for batch norm."""
        samples = STREAMS.read(data)
        seen = ~samples.held_out
        samples = STREAMS.prepare(samples, seen)
        return NormModel(fitted, STREAMS.fit(samples.take(seen & samples.telling)).parameters_)


SOFTMAX_TRAINING, NORM_TRAINING = SoftmaxTraining(), NormTraining()


def with_row_offsets(samples: VectorSamples, seen: BoolArray, features: Features) -> VectorSamples:
    """Samples with the host's offset of every device: the constant that the features leave over."""
    offset = np.zeros(len(samples))
    for index, device in enumerate(samples.devices):
        mine = samples.device == index
        use = mine & seen & samples.telling
        if not (use & (samples.floor > 0)).any():
            continue
        item = np.full(int(use.sum()), 4.0)
        matrix = features(device, samples.rows[use], samples.cols[use], item)
        matrix = np.concatenate([np.full((len(matrix), 1), 1e-5), matrix], axis=1)
        constant = 1e-5 * relative_fit(matrix, samples.seconds[use])[0] - START_SECONDS
        floor = float(samples.floor[mine].max())
        offset[mine] = np.clip(constant, max(floor - _LONGEST_HIDDEN, 0.0), floor)
    return replace(samples, offset=offset)

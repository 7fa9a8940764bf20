"""Fits convolutions to NeuSight (3x3, fp32, forward) and DeepBench (all directions, fp32 and fp16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from traincast.costs.kernels.conv.fitting import fit_weights
from traincast.costs.kernels.conv.host_delay import with_host_parts
from traincast.costs.kernels.conv.measured import DEEPBENCH_FILE, NEUSIGHT_FILE, ConvSamples, read_convolutions
from traincast.costs.kernels.conv.model import ConvModel
from traincast.costs.kernels.solve import spread_90
from traincast.costs.kernels.training import ModelTraining, Predictor, unseen_spread
from traincast.costs.measured_tables import held_out
from traincast.utils.arrays import BoolArray
from traincast.utils.metrics import mean_error_percent

_ENOUGH_SAMPLES = 100  # of a device, for a spread of its own
_LEAST_SPREAD = 0.05  # log-sigma: what the physics alone is good to, see `conv.fitting`


class ConvTraining(ModelTraining[ConvSamples, ConvModel]):
    """Weights of every way to compute, and trees on what they leave over."""

    profile: ClassVar[str] = "conv"
    sources: ClassVar[tuple[str, ...]] = (
        "sitar-lab/NeuSight @ 6945927d (MIT)",
        "baidu-research/DeepBench @ da81ba78 (Apache-2.0)",
    )
    files: ClassVar[tuple[str, ...]] = (NEUSIGHT_FILE, DEEPBENCH_FILE)

    def read(self, data: Path) -> ConvSamples:
        """All convolutions of both sources."""
        return read_convolutions(data)

    def prepare(self, samples: ConvSamples, seen: BoolArray) -> ConvSamples:
        """With the host's part of event-timed ones."""
        return with_host_parts(samples, seen)

    def fit(self, samples: ConvSamples) -> ConvModel:
        """The model of these samples."""
        return ConvModel().fit(samples.measurements())

    def calibrate(self, fitted: ConvModel, samples: ConvSamples, seen: BoolArray) -> ConvModel:
        """Spreads from a fifth of the seen shapes, whose host parts nobody knows, and from chips left out."""
        assert fitted.parameters_ is not None
        calls = samples.calls
        left_out = seen & held_out(calls["in_channels"], calls["batch"], calls["out_channels"], calls["in_h"])
        judged = self.prepare(samples, seen & ~left_out)
        trial = self.fit(judged.take(seen & ~left_out))
        sigma = [_spread(trial, judged, left_out, key) for key in fitted.parameters_.chips.keys]
        plain = seen & calls.is_compute("fp32")
        unseen = unseen_spread(samples, seen, plain, physics_predictor)
        return ConvModel(fitted.parameters_.with_spread(np.array(sigma), unseen), fitted.residual_)

    def provenance(self, fitted: ConvModel, samples: ConvSamples) -> dict[str, Any]:
        """With the errors of either source, and what the host adds on each device."""
        common = super().provenance(fitted, samples)
        del common["mean_error_percent_held_out"]
        held, timed = samples.held_out, samples.event_timed
        shown, _ = samples.predicted(fitted.predict)
        for name, chosen in (("neusight", held & timed), ("deepbench", held & ~timed)):
            error = mean_error_percent(shown[chosen], samples.seconds[chosen])
            common[f"mean_error_percent_held_out_{name}"] = error
        parts = {device.key: held & timed & (samples.device == i) for i, device in enumerate(samples.devices)}
        offsets = {key: round(1e6 * float(samples.offset[mine].mean()), 1) for key, mine in parts.items() if mine.any()}
        return {**common, "host_offset_us": offsets}


TRAINING = ConvTraining()


def physics_predictor(samples: ConvSamples) -> Predictor:
    """What the physics alone says, weighted by these samples: the trees know only the chips they have seen."""
    return ConvModel(fit_weights(samples.measurements())).predict


def _spread(trial: ConvModel, samples: ConvSamples, chosen: BoolArray, key: str) -> float:
    """Log-sigma of a device; one with few samples to judge by shares that of all queue-timed devices."""
    index = [device.key for device in samples.devices].index(key)
    plain = chosen & samples.calls.is_compute("fp32")
    mine = plain & (samples.device == index)
    part = samples.take(mine if mine.sum() >= _ENOUGH_SAMPLES else plain & ~samples.event_timed)
    shown, _ = part.predicted(trial.predict)
    added = np.where(part.event_timed, part.unsure / shown, ConvModel.UNMEASURED)
    return max(spread_90(shown, part.seconds, added), _LEAST_SPREAD)

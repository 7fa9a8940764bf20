"""A published step of a Transformer: its model, platform and layout as values, for layouts that no option describes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from traincast.hardware.platform import Platform, add_default_links, load_platform
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.reading import load_transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.predict import predict_layout_memory, predict_parallel
from traincast.simulator.prediction.result import Prediction
from traincast.utils.metrics import Z90


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """Which Transformer (built in, described in a file, or itself) is trained where, and how it is laid out. `doubt` is
    a log-sigma of the step besides, for what its source leaves open."""

    model: str | Transformer
    on: str | Platform
    layout: Layout
    roofline_only: bool = False
    doubt: float = 0.0

    def platform(self) -> Platform:
        """The platform asked for; a single GPU gets the links usual for it."""
        return add_default_links(load_platform(self.on) if isinstance(self.on, str) else self.on)

    def transformer(self) -> Transformer:
        """The model asked for."""
        return load_transformer(self.model) if isinstance(self.model, str) else self.model


def predict_training(request: TrainingRequest) -> Prediction:
    """The step, simulated."""
    predicted = predict_parallel(
        request.transformer(), request.platform(), request.layout, roofline_only=request.roofline_only,
        check_memory=False,
    )  # fmt: skip
    if not request.doubt:
        return predicted
    known = math.log(predicted.interval[1] / predicted.iteration)
    wide = math.exp(math.hypot(known, Z90 * request.doubt))
    return replace(predicted, interval=(predicted.iteration / wide, predicted.iteration * wide))


def predict_peak_bytes(request: TrainingRequest) -> int:
    """Bytes that the fullest rank holds at once."""
    return predict_layout_memory(request.transformer(), request.platform(), request.layout).peak_bytes

"""What a scaling curve is: one step predicted on several numbers of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.prediction.prediction import Prediction


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One number of GPUs. `throughput` is samples per second of all of them; `efficiency` is the throughput of a GPU
    relative to that of a GPU at the first point of the curve."""

    gpus: int
    nodes: int
    global_batch: int
    throughput: float
    efficiency: float
    answer: Prediction


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Predictions of one step over numbers of GPUs: `kind` is "weak" (the batch of a GPU stays) or "strong" (the
    batch of all GPUs together stays)."""

    kind: str
    points: tuple[ScalingPoint, ...]

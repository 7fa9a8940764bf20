"""How well softmax and layer norm are predicted: unseen shapes, unseen splits, unseen GPUs."""

from __future__ import annotations

from pathlib import Path

from traincast.kernels.model import load_state
from traincast.kernels.rowwise.parameters import RowParameters
from traincast.kernels.rowwise.training import NORM_TRAINING, SOFTMAX_TRAINING, RowTraining
from traincast.kernels.shipped import PROFILES
from traincast.kernels.streaming.evaluation import evaluate_vectors
from traincast.measurements.metrics import ErrorRow


def evaluate_softmax(data: Path) -> list[ErrorRow]:
    """Softmax forward."""
    return _evaluate(SOFTMAX_TRAINING, data)


def evaluate_norm(data: Path) -> list[ErrorRow]:
    """Layer norm forward."""
    return _evaluate(NORM_TRAINING, data)


def _evaluate(training: RowTraining, data: Path) -> list[ErrorRow]:
    shipped = RowParameters.from_state(load_state(PROFILES / training.profile))
    return evaluate_vectors(training.op, training, training.predictor(shipped), data)

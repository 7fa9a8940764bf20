"""How well softmax and layer norm are predicted: unseen shapes, unseen splits, unseen GPUs."""

from __future__ import annotations

from pathlib import Path

from traincast.costs.kernels.contract import load_state
from traincast.costs.kernels.families import PROFILES
from traincast.costs.kernels.rowwise.model import RowParameters
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.kernels.rowwise.fit import NORM_TRAINING, SOFTMAX_TRAINING, RowTraining
from traincast_evaluation.kernels.streaming.evaluate import evaluate_vectors


def evaluate_softmax(data: Path) -> list[ErrorRow]:
    """Softmax forward."""
    return _evaluate(SOFTMAX_TRAINING, data)


def evaluate_norm(data: Path) -> list[ErrorRow]:
    """Layer norm forward."""
    return _evaluate(NORM_TRAINING, data)


def _evaluate(training: RowTraining, data: Path) -> list[ErrorRow]:
    shipped = RowParameters.from_state(load_state(PROFILES / training.profile))
    return evaluate_vectors(training.op, training, training.predictor(shipped), data)

"""How well softmax and layer norm are predicted: unseen shapes, unseen splits, unseen GPUs."""

from __future__ import annotations

from pathlib import Path

from traincast.arrays import BoolArray
from traincast.kernels.model import load_state
from traincast.kernels.rowwise.parameters import RowParameters
from traincast.kernels.rowwise.training import fit_parameters, predict_rows, with_row_offsets
from traincast.kernels.shipped import PROFILES
from traincast.kernels.streaming.evaluation import Predict, evaluate_vectors
from traincast.kernels.streaming.vectors import VectorRows, read_vectors
from traincast.measurements.metrics import ErrorRow


def evaluate_softmax(data: Path) -> list[ErrorRow]:
    """Softmax forward."""
    return _evaluate("softmax", "softmax", data)


def evaluate_norm(data: Path) -> list[ErrorRow]:
    """Layer norm forward."""
    return _evaluate("ln", "norm", data)


def _evaluate(op: str, profile: str, data: Path) -> list[ErrorRow]:
    rows = read_vectors(data, op)
    shipped = RowParameters.from_state(load_state(PROFILES / profile))

    def train(rows: VectorRows, seen: BoolArray) -> Predict:
        parameters = fit_parameters(rows, seen)
        return lambda some: predict_rows(parameters, some)

    return evaluate_vectors(op, rows, with_row_offsets, lambda some: predict_rows(shipped, some), train)

"""How well element-wise kernels, softmax and layer norm are predicted: unseen shapes, unseen splits, unseen GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np

from traincast.arrays import BoolArray, FloatArray
from traincast.kernels.model import load_state
from traincast.kernels.shipped import PROFILES
from traincast.kernels.streaming import training as stream_fit
from traincast.kernels.streaming.model import ElementwiseModel
from traincast.kernels.streaming.vectors import VectorRows, read_vectors
from traincast.measurements.metrics import ErrorRow, error_row, within

Predict: TypeAlias = Callable[[VectorRows], tuple[FloatArray, FloatArray]]
Offsets: TypeAlias = Callable[[VectorRows, BoolArray], VectorRows]
Train: TypeAlias = Callable[[VectorRows, BoolArray], Predict]

# published mean absolute errors of NeuSight on its test split: devices in its training set, and not
_NEUSIGHT = {"elementwise": (14.0, 19.3), "softmax": (19.3, 13.9), "ln": (20.1, 56.7)}


def evaluate_elementwise(data: Path) -> list[ErrorRow]:
    """Element-wise kernels."""
    rows = read_vectors(data, "elementwise")
    shipped = ElementwiseModel.from_state(load_state(PROFILES / "elementwise"))

    def train(rows: VectorRows, seen: BoolArray) -> Predict:
        model = stream_fit.fit_model(rows, seen)
        return lambda some: stream_fit.predict_rows(model, some)

    return evaluate_vectors(
        "elementwise", rows, stream_fit.with_offsets, lambda some: stream_fit.predict_rows(shipped, some), train
    )


def evaluate_vectors(op: str, rows: VectorRows, offsets: Offsets, shipped: Predict, train: Train) -> list[ErrorRow]:
    """Shapes never seen, NeuSight's test split, and GPUs never seen, each by device."""
    table = []
    fair = offsets(rows, ~rows.held_out)
    table += _per_device(f"{op}: shapes never seen", fair, fair.held_out & fair.above, shipped, calibrated=True)
    split = offsets(rows, ~rows.test)
    table += _test_split(op, split, train(split, ~split.test))
    for index, device in enumerate(fair.devices):
        twins = [i for i, d in enumerate(fair.devices) if (d.arch, d.num_sms) == (device.arch, device.num_sms)]
        without = train(fair, ~fair.held_out & ~np.isin(fair.device, twins))
        mine = fair.held_out & fair.above & (fair.device == index)
        table += _per_device(f"{op}: GPU never seen (data sheet only)", fair, mine, without)
    return table


def _test_split(op: str, rows: VectorRows, predict: Predict) -> list[ErrorRow]:
    """Fitted on the `train` split alone. Devices with train rows are in NeuSight's distribution, the others out."""
    inside = np.isin(rows.device, np.unique(rows.device[~rows.test]))
    table = []
    for name, chosen, published in (("in", inside, _NEUSIGHT[op][0]), ("out of", ~inside, _NEUSIGHT[op][1])):
        reference = f"NeuSight MAPE {published} %"
        some = rows.take(rows.test & chosen)
        table.append(_row(f"{op}: test split", f"{name} distribution", some, predict, reference))
    return table + _per_device(f"{op}: test split", rows, rows.test, predict)


def _per_device(
    suite: str, rows: VectorRows, chosen: BoolArray, predict: Predict, *, calibrated: bool = False
) -> list[ErrorRow]:
    table = []
    for index, device in enumerate(rows.devices):
        some = rows.take(chosen & (rows.device == index))
        if len(some.op):
            table.append(_row(suite, device.key, some, predict, calibrated=calibrated))
    return table


def _row(
    suite: str, group: str, rows: VectorRows, predict: Predict, reference: str = "", *, calibrated: bool = False
) -> ErrorRow:
    """`calibrated` where the spreads are: those of a model fitted for this table are not."""
    seconds, sigma = predict(rows)
    shown = rows.as_measured(seconds)
    inside = within(shown, rows.seconds, sigma) if calibrated else None
    return error_row(suite, group, shown, rows.seconds, _names(rows), reference, inside)


def _names(rows: VectorRows) -> list[str]:
    return [f"{op} {r:.0f}x{c:.0f}" for op, r, c in zip(rows.op, rows.rows, rows.cols, strict=True)]

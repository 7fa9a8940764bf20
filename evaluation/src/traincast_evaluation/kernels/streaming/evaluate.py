"""How well kernels over vectors are predicted: unseen shapes, unseen splits, unseen GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traincast.costs.kernels.contract import load_state
from traincast.costs.kernels.families import PROFILES
from traincast.costs.kernels.streaming.model import ElementwiseModel
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.kernels.evaluate import summarise_by_device, summarise_samples, summarise_unseen_chips
from traincast_evaluation.kernels.fit import FamilyTraining, Fitted, Predictor
from traincast_evaluation.kernels.streaming.fit import TRAINING
from traincast_evaluation.kernels.streaming.measurements import VectorSamples

# published mean absolute errors of NeuSight on its test split: devices in its training set, and not
_NEUSIGHT = {"elementwise": (14.0, 19.3), "softmax": (19.3, 13.9), "ln": (20.1, 56.7)}


def evaluate_elementwise(data: Path) -> list[ErrorRow]:
    """Element-wise kernels."""
    shipped = ElementwiseModel.from_state(load_state(PROFILES / "elementwise"))
    return evaluate_vectors("elementwise", TRAINING, shipped.predict, data)


def evaluate_vectors(
    op: str, training: FamilyTraining[VectorSamples, Fitted], shipped: Predictor, data: Path
) -> list[ErrorRow]:
    """Shapes never seen, NeuSight's test split, and GPUs never seen, each by device."""
    samples = training.read(data)
    fair = training.prepare(samples, ~samples.held_out)
    held = fair.held_out & fair.telling
    split = training.prepare(samples, ~samples.test)
    of_train_split = training.predictor(training.fit(split.take(~split.test & split.telling)))
    unseen = f"{op}: GPU never seen (data sheet only)"
    older = f"{op}: generation never seen"

    def fit(others: VectorSamples) -> Predictor:
        return training.predictor(training.fit(others))

    return [
        *summarise_by_device(f"{op}: shapes never seen", fair, held, shipped),
        *_test_split(op, split, of_train_split),
        *summarise_unseen_chips(unseen, fair, held, fit),
        *summarise_unseen_chips(older, fair, held, fit, generation=True),
    ]


def _test_split(op: str, samples: VectorSamples, predict: Predictor) -> list[ErrorRow]:
    """Fitted on the `train` split alone. Devices with train rows are in NeuSight's distribution, the others out."""
    suite, inside = f"{op}: test split", np.isin(samples.device, np.unique(samples.device[~samples.test]))
    table = []
    for name, chosen, published in (("in", inside, _NEUSIGHT[op][0]), ("out of", ~inside, _NEUSIGHT[op][1])):
        part = samples.take(samples.test & chosen)
        reference = f"NeuSight MAPE {published} %"
        table.append(summarise_samples(suite, f"{name} distribution", part, predict, reference, calibrated=False))
    return table + summarise_by_device(suite, samples, samples.test, predict, calibrated=False)

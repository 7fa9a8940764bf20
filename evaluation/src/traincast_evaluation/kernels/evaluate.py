"""Tables of errors that families share: by device, and by device as if it had never been measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from traincast.utils.arrays import BoolArray
from traincast.utils.metrics import ErrorRow, compute_error_row, compute_half_widths, is_within_interval
from traincast_evaluation.kernels.fit import AnySamples, Predictor, leave_one_chip_out
from traincast_evaluation.kernels.samples import Samples

Evaluation: TypeAlias = Callable[[Path], list[ErrorRow]]
"""Error rows against the measurements of a folder."""


def summarise_samples(
    suite: str, group: str, samples: Samples, predict: Predictor, reference: str = "", *, calibrated: bool = True
) -> ErrorRow:
    """The errors on all of these samples; `calibrated` where the spreads are: those of a model fitted for a table of
    errors are not."""
    shown, sigma = samples.predicted(predict)
    inside = is_within_interval(shown, samples.seconds, sigma) if calibrated else None
    half_widths = compute_half_widths(sigma) if calibrated else None
    return compute_error_row(suite, group, shown, samples.seconds, samples.names(), reference, inside, half_widths)


def summarise_by_device(
    suite: str, samples: Samples, chosen: BoolArray, predict: Predictor, *, calibrated: bool = True
) -> list[ErrorRow]:
    """A row for every device that has `chosen` samples."""
    parts = [(device.key, chosen & (samples.device == index)) for index, device in enumerate(samples.devices)]
    return [
        summarise_samples(suite, key, samples.take(mine), predict, calibrated=calibrated)
        for key, mine in parts
        if mine.any()
    ]


def summarise_unseen_chips(
    suite: str, samples: AnySamples, judged: BoolArray, fit: Callable[[AnySamples], Predictor], *,
    generation: bool = False,
) -> list[ErrorRow]:  # fmt: skip
    """A row for every device: its `judged` samples, predicted from its data sheet and the samples of other chips, or of
    other generations."""
    table = []
    for index, elsewhere in leave_one_chip_out(samples, ~samples.held_out & samples.telling, generation=generation):
        predict = fit(samples.take(elsewhere))
        table += summarise_by_device(suite, samples, judged & (samples.device == index), predict, calibrated=False)
    return table

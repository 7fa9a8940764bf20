"""Embedding kernels against measured ones: rows that no rate was fitted to, and apart from them those that some was."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traincast.arrays import BoolArray
from traincast.kernels.embedding.measured import read_embedding
from traincast.kernels.embedding.model import EmbeddingModel
from traincast.kernels.embedding.training import LEAST_SECONDS, judged_spreads
from traincast.kernels.model import load_state
from traincast.kernels.shipped import PROFILES
from traincast.measurements.metrics import ErrorRow, error_row, within


def evaluate_embedding(data: Path) -> list[ErrorRow]:
    """Accuracy rows of held-out kernels above 50 us and below, then of the fitted ones.

    Intervals are those that the other held-out shapes tell.
    """
    samples = read_embedding(data)
    seconds, _ = samples.predicted(EmbeddingModel.from_state(load_state(PROFILES / "embedding")).predict)
    sigma = judged_spreads(samples, seconds)
    long, fitted = samples.seconds >= LEAST_SECONDS, ~samples.held_out

    def row(suite: str, group: str, chosen: BoolArray) -> ErrorRow:
        judged = not np.isnan(sigma[chosen]).any()
        inside = within(seconds[chosen], samples.seconds[chosen], sigma[chosen]) if judged else None
        return error_row(
            suite, group, seconds[chosen], samples.seconds[chosen], samples.name[chosen].tolist(), inside=inside
        )

    new = samples.held_out & ~np.isin(samples.shape.astype(str), samples.shape[fitted].astype(str))
    table = [
        row("embedding: held out", "all above 50 us", samples.held_out & long),
        row("embedding: held out", "all above 50 us, no further steps of a fitted job", new & long),
    ]
    for suite, part in (("embedding: held out", samples.held_out), ("embedding: fitted", fitted)):
        for words, size in (("above 50 us", long), ("below 50 us", ~long)):
            for group in sorted(set(samples.group[part & size].tolist())):
                table.append(row(suite, f"{group}, {words}", part & size & (samples.group == group)))
    return table

"""Embedding kernels against measured ones: rows that no rate was fitted to, and apart from them those that some was."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traincast.arrays import BoolArray
from traincast.kernels.embedding.measured import read_embedding
from traincast.kernels.embedding.model import EmbeddingModel
from traincast.kernels.embedding.training import LEAST_SECONDS, judged_spreads, predict_rows
from traincast.kernels.model import load_state
from traincast.kernels.shipped import PROFILES
from traincast.measurements.metrics import ErrorRow, error_row, within


def evaluate_embedding(data: Path) -> list[ErrorRow]:
    """Accuracy rows of held-out kernels above 50 us and below, then of the fitted ones.

    Intervals are those that the other held-out shapes tell.
    """
    rows = read_embedding(data)
    seconds = predict_rows(EmbeddingModel.from_state(load_state(PROFILES / "embedding")), rows)
    sigma = judged_spreads(rows, seconds)
    long, fitted = rows.seconds >= LEAST_SECONDS, ~rows.held_out

    def row(suite: str, group: str, chosen: BoolArray) -> ErrorRow:
        judged = not np.isnan(sigma[chosen]).any()
        inside = within(seconds[chosen], rows.seconds[chosen], sigma[chosen]) if judged else None
        return error_row(suite, group, seconds[chosen], rows.seconds[chosen], rows.name[chosen].tolist(), inside=inside)

    new = rows.held_out & ~np.isin(rows.shape.astype(str), rows.shape[fitted].astype(str))
    table = [
        row("embedding: held out", "all above 50 us", rows.held_out & long),
        row("embedding: held out", "all above 50 us, no further steps of a fitted job", new & long),
    ]
    for suite, part in (("embedding: held out", rows.held_out), ("embedding: fitted", fitted)):
        for words, size in (("above 50 us", long), ("below 50 us", ~long)):
            for group in sorted(set(rows.group[part & size].tolist())):
                table.append(row(suite, f"{group}, {words}", part & size & (rows.group == group)))
    return table

"""Embedding kernels and whole lookups against measured ones: rows that no rate was fitted to, and apart from them those
that some was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from traincast.costs.kernels.contract import load_state
from traincast.costs.kernels.embedding.model import EmbeddingModel
from traincast.costs.kernels.families import PROFILES
from traincast.utils.arrays import BoolArray
from traincast.utils.metrics import ErrorRow, compute_error_row, compute_half_widths, is_within_interval
from traincast_evaluation.kernels.embedding.fit import LEAST_SECONDS, judge_spreads
from traincast_evaluation.kernels.embedding.lookups import WholeLookup, WholeLookups, uses_links
from traincast_evaluation.kernels.embedding.measurements import read_embedding
from traincast_evaluation.solve import compute_spread_90

HELD_BACK = "whole lookups: held out by configuration"
"""A third of the configurations of the public lookup tables, by a seeded hash of their columns."""


def evaluate_embedding(data: Path) -> list[ErrorRow]:
    """Accuracy rows of held-out kernels above 50 us and below, then of the fitted ones.

    Intervals are those that the other held-out shapes tell.
    """
    samples = read_embedding(data)
    model = EmbeddingModel.from_state(load_state(PROFILES / "embedding"))
    seconds, _ = samples.predicted(model.predict)
    sigma = judge_spreads(samples, seconds)
    long, fitted = samples.seconds >= LEAST_SECONDS, ~samples.held_out

    def row(suite: str, group: str, chosen: BoolArray) -> ErrorRow:
        judged = not np.isnan(sigma[chosen]).any()
        inside = is_within_interval(seconds[chosen], samples.seconds[chosen], sigma[chosen]) if judged else None
        return compute_error_row(
            suite, group, seconds[chosen], samples.seconds[chosen], samples.name[chosen].tolist(), inside=inside,
            half_widths=compute_half_widths(sigma[chosen]) if judged else None,
        )  # fmt: skip

    new = samples.held_out & ~np.isin(samples.shape.astype(str), samples.shape[fitted].astype(str))
    table = [
        row("embedding: held out", "all above 50 us", samples.held_out & long),
        row("embedding: held out", "all above 50 us, no further steps of a fitted job", new & long),
    ]
    for suite, part in (("embedding: held out", samples.held_out), ("embedding: fitted", fitted)):
        for words, size in (("above 50 us", long), ("below 50 us", ~long)):
            for group in sorted(set(samples.group[part & size].tolist())):
                table.append(row(suite, f"{group}, {words}", part & size & (samples.group == group)))
    return [*table, *_whole_rows(samples.whole, model)] if samples.whole else table


def _whole_rows(lookups: Sequence[WholeLookup], model: EmbeddingModel) -> list[ErrorRow]:
    """Whole lookups of public benchmarks: those of configurations that were held back first, together and by group.

    An interval is that of the other held-out configurations.
    """
    seconds = WholeLookups(lookups).seconds(model.parameters_.rates, model.parameters_.watches)
    linked = np.array([uses_links(lookup) for lookup in lookups])
    held = np.array([lookup.held_out for lookup in lookups])
    group, name = (np.array([getattr(lookup, field) for lookup in lookups]) for field in ("group", "name"))
    measured = np.array([lookup.seconds for lookup in lookups])
    inside, sigmas = np.zeros(len(lookups), dtype=np.bool_), np.zeros(len(lookups))
    for row in np.flatnonzero(held):
        others = held & (linked == linked[row]) & (name != name[row])
        sigmas[row] = compute_spread_90(seconds[others], measured[others])
        inside[row] = is_within_interval(seconds[[row]], measured[[row]], sigmas[[row]])[0]

    def row_of(suite: str, words: str, chosen: BoolArray) -> ErrorRow:
        judged = suite == HELD_BACK
        return compute_error_row(
            suite, words, seconds[chosen], measured[chosen], name[chosen].tolist(),
            inside=inside[chosen] if judged else None,
            half_widths=compute_half_widths(sigmas[chosen]) if judged else None,
        )  # fmt: skip

    table = [
        row_of(HELD_BACK, words, held & chosen)
        for words, chosen in (("all in HBM", ~linked), ("all in UVM, caches and over links", linked))
        if (held & chosen).any()
    ]
    for suite, part in ((HELD_BACK, held), ("whole lookups: fitted", ~held)):
        table += [row_of(suite, words, part & (group == words)) for words in sorted(set(group[part].tolist()))]
    return table

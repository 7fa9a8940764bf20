"""Accuracy tables as text."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.utils.display.text import format_table
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.suites.cases import Outcome
from traincast_evaluation.suites.registry import Evaluation


def format_evaluation(evaluation: Evaluation) -> str:
    """Cases, where there are any, then the summary and what was left out."""
    left_out = [f"left out: {row.name}: {row.reason}" for row in evaluation.left_out]
    summary = [format_summary(evaluation.summary), *left_out, *evaluation.notes]
    cases = [format_cases(evaluation.outcomes), ""] if evaluation.outcomes else []
    return "\n".join([*cases, *summary])


def format_summary(rows: Sequence[ErrorRow]) -> str:
    """One line per group, percent: n, GMAE, MAPE, median, worst with its case, bias, share of measurements in the 90 %
    interval and the median of half its width, and what others score."""
    header = (
        "suite",
        "group",
        "n",
        "GMAE",
        "MAPE",
        "median",
        "worst",
        "bias",
        "in 90 %",
        "half-width",
        "worst case",
        "others",
    )
    cells = [
        (
            row.suite, row.group, str(row.n), f"{row.gmae:.2f}", f"{row.mape:.2f}", f"{row.median:.2f}",
            f"{row.worst:+.1f}", f"{row.bias:+.1f}", "" if row.covered is None else f"{row.covered:.0f}",
            "" if row.half_width is None else f"{row.half_width:.1f}",
            row.worst_case, row.reference,
        )
        for row in rows
    ]  # fmt: skip
    return format_table(header, cells, right=(2, 3, 4, 5, 6, 7, 8, 9))


def format_cases(outcomes: Sequence[Outcome]) -> str:
    """One line per case, with the errors of others alongside ours, and the spread of repeated measurements where it is
    known (percent)."""
    others = list(dict.fromkeys(name for outcome in outcomes for name in outcome.case.others))
    repeated = ("spread",) if any(outcome.case.spread_percent is not None for outcome in outcomes) else ()
    header = ("device", "case", "measured ms", "predicted ms", "90 % interval", "error", *repeated, "active", *others)
    cells = [
        (
            o.case.group,
            o.case.name,
            f"{o.case.measured_ms:.2f}",
            f"{o.predicted_ms:.2f}",
            f"{o.low_ms:.2f} - {o.high_ms:.2f}",
            f"{o.error_percent:+.1f}",
            *("" if o.case.spread_percent is None else f"{o.case.spread_percent:.1f}" for _ in repeated),
            "" if o.active_error_percent is None else f"{o.active_error_percent:+.1f}",
            *(f"{o.case.others[name]:+.1f}" if name in o.case.others else "" for name in others),
        )
        for o in outcomes
    ]
    covered = sum(outcome.covered for outcome in outcomes)
    inside = f"inside the 90 % interval: {covered} of {len(outcomes)}"
    return format_table(header, cells, right=tuple(range(2, len(header)))) + f"\n{inside}"

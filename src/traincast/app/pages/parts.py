"""Parts that pages of several kinds of results share: the number at the top, shares of a step, tables of records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from traincast.app.pages.elements import (
    Html,
    escape_html,
    fold_block,
    join_blocks,
    make_bar,
    make_list,
    make_paragraph,
    make_stack,
    make_table,
)
from traincast.simulator.prediction.warnings import Trust
from traincast.utils.display.text import format_milliseconds

_MOST_ROWS = 200  # of a table of records: a page is for reading; `records` has them all

NO_PRICE = "No price of a GPU was given, so there are no dollars here."


def make_number_html(seconds: float, interval: tuple[float, float] | None, unit: str = "ms per step") -> Html:
    """The time of a step, large, and its interval below."""
    large = Html(f'<p class="answer">{format_milliseconds(seconds)} <small>{escape_html(unit)}</small></p>')
    if interval is None:
        return large
    low, high = (format_milliseconds(limit) for limit in interval)
    return join_blocks([large, make_paragraph(f"90 % interval: {low} to {high} ms", "interval")])


def make_verdict_html(trust: Trust) -> Html:
    """What the number rests on, in a word and a line."""
    word, _, line = trust.sentence.partition(": ")
    kind = {"measured": "good", "partly extrapolated": "fair"}.get(trust.word, "poor")
    return join_blocks([make_paragraph(word, f"verdict {kind}"), make_paragraph(line.capitalize(), "note")])


def make_warnings_html(warnings: Iterable[str]) -> Html:
    """Warnings of a result, or nothing."""
    return make_list(warnings, "warnings")


def make_step_stack(
    parts: Sequence[tuple[str, float]], whole: float, label: str, longest: float | None = None
) -> Html:  # fmt: skip
    """Parts of a step (seconds) side by side; `longest` is what a full width stands for (default: this step)."""
    whole = whole or 1.0
    shown = [(name, seconds, f"{format_milliseconds(seconds)} ms, {seconds / whole:.0%}") for name, seconds in parts]
    return make_stack(shown, label, 1.0 if longest is None else whole / (longest or 1.0))


def make_seconds_table(what: str, seconds: Mapping[str, float], caption: str, most: int = 15) -> Html:
    """Names with their seconds, longest first, as milliseconds, shares and bars; the rest in one line."""
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    shown, rest = ranked[:most], ranked[most:]
    if rest:
        shown.append((f"{len(rest)} more", sum(length for _, length in rest)))
    whole = sum(seconds.values()) or 1.0
    longest = max((length for _, length in shown), default=0.0) or 1.0
    rows = [(name, format_milliseconds(s), f"{s / whole:.1%}", make_bar(s / longest)) for name, s in shown]
    return make_table((what, "ms", "share", ""), rows, right=(1, 2), caption=caption)


def make_records_table(rows: Sequence[Mapping[str, Any]], caption: str) -> Html:
    """Plain rows as a table: columns as they come, numbers to five digits; what is too long for a page is cut."""
    header = list(dict.fromkeys(column for row in rows for column in row))
    shown = rows[:_MOST_ROWS]
    numbers = [at for at, name in enumerate(header) if any(_is_number(row.get(name)) for row in shown)]
    cells = [[_format_cell(row.get(name)) for name in header] for row in shown]
    more = f" (the first {_MOST_ROWS} of {len(rows)})" if len(rows) > len(shown) else ""
    titles = [name.replace("_", " ") for name in header]
    return make_table(titles, cells, right=numbers, caption=f"{caption}{more}")


def fold_records(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> Html:
    """Tables of a result, each behind its name."""
    named = [(name.replace("_", " "), rows) for name, rows in records.items() if rows]
    return join_blocks(fold_block(f"{name} ({len(rows)})", make_records_table(rows, name)) for name, rows in named)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else str(value)

"""The page of an accuracy suite: predicted against measured, groups and cases, the worst ones shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traincast.app.pages.charts import Chart
from traincast.app.pages.page import Page, Section, join_blocks, make_chart, make_facts, make_paragraph
from traincast.app.pages.parts import make_records_table, make_software_section, make_warnings_html
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path, read_document

_NUMBERS = ("n", "gmae", "mape", "median", "worst", "bias")
_WORST = 10
_MOST = 2000  # cases of a page: of more, every so many-th
Rows = Sequence[Mapping[str, Any]]


def read_evaluation_page(path: Path) -> Page:
    """The page of what `evaluate` printed as JSON into a file."""
    document = read_document(path)
    where = format_path(path)
    summary = document.get("summary") if isinstance(document, dict) else None
    cases = document.get("cases", []) if isinstance(document, dict) else []
    if not summary or not _is_list_of_rows(summary) or not _is_list_of_rows(cases):
        raise TraincastError(f"'{where}' is no evaluation: it needs rows of `summary` and `cases`")
    for row in summary:
        if not all(isinstance(row.get(name), int | float) for name in _NUMBERS):
            raise TraincastError(f"'{where}': a row of `summary` needs numbers {', '.join(_NUMBERS)}")
    return build_suite_page(str(summary[0].get("suite", path.stem)), summary, cases, [])


def _is_list_of_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def build_suite_page(suite: str, summary: Rows, cases: Rows, notes: Sequence[str]) -> Page:
    """The page of a suite from the rows of its summary (percent) and of its cases (ms), and what is to be noted."""
    first = summary[0]
    known = [
        ("Cases", str(first["n"])), ("GMAE", f"{first['gmae']:.2f} %"), ("Median error", f"{first['median']:.2f} %"),
        ("Worst", f"{first['worst']:+.1f} % ({first.get('worst_case', '')})"), ("Bias", f"{first['bias']:+.1f} %"),
    ]  # fmt: skip
    compared = [row for row in cases if _has_both_times(row)]
    pieces = [
        make_paragraph(f"{first['mape']:.2f} % mean absolute error", "answer"),
        make_facts(known),
        make_records_table([_drop_nested_cells(row) for row in summary], "Groups; errors in percent"),
        make_warnings_html(notes),
    ]
    sections = [Section(key="answer", title="How wrong", html=join_blocks(pieces))]
    if compared:
        sections.append(_build_cases_section(compared))
    return Page(title=f"Accuracy: {suite}", subtitle="predicted against measured",
                sections=[*sections, make_software_section([])])  # fmt: skip


def _build_cases_section(cases: Rows) -> Section:
    worst = sorted(cases, key=lambda row: -abs(row["predicted_ms"] / row["measured_ms"] - 1))[:_WORST]
    every = -(-len(cases) // _MOST)
    shown = cases[::every]
    which = "every case" if every == 1 else f"one case in {every}"
    html = join_blocks(
        [
            make_chart(
                "cases",
                f"Predicted over measured milliseconds of {which}",
                "On the line, prediction and measurement agree; dashed: 20 % apart.",
            ),
            make_records_table([_drop_nested_cells(row) for row in worst], "The worst cases"),
            make_records_table([_drop_nested_cells(row) for row in shown], f"Cases: {which}"),
        ]
    )
    return Section(key="cases", title="Case by case", html=html, charts={"cases": _build_cases_chart(shown)})


def _has_both_times(row: Mapping[str, Any]) -> bool:
    """Whether a case has both times, and they can be put on a logarithmic axis."""
    times = row.get("measured_ms"), row.get("predicted_ms")
    return all(isinstance(time, int | float) and 0 < time < 1e15 for time in times)


def _drop_nested_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, dict | list)}


def _build_cases_chart(cases: Rows) -> Chart:
    ordered = sorted(cases, key=lambda row: float(row["measured_ms"]))
    x = [float(row["measured_ms"]) for row in ordered]
    return {
        "x": x, "x_label": "measured, ms", "y_label": "predicted, ms", "log_x": True, "log_y": True,
        "series": [
            {"label": "equal", "y": x, "kind": "edge", "strong": True},
            {"label": "20 % more", "y": [1.2 * time for time in x], "kind": "edge", "dash": 1, "strong": True},
            {"label": "20 % less", "y": [0.8 * time for time in x], "kind": "edge", "dash": 1, "strong": True},
            {"label": "cases", "y": [float(row["predicted_ms"]) for row in ordered], "kind": "points", "slot": 0},
        ],
    }  # fmt: skip

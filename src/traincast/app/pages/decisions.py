"""Pages of decisions: a what-if, advice, a sweep; and the what-ifs that stand on the page of every prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traincast.app.pages.charts import Chart
from traincast.app.pages.elements import (
    Html,
    fold_block,
    join_blocks,
    make_bar,
    make_chart,
    make_facts,
    make_heading,
    make_paragraph,
    make_table,
)
from traincast.app.pages.page import Page, Section
from traincast.app.pages.parts import (
    make_number_html,
    make_records_table,
    make_step_stack,
    make_verdict_html,
    make_warnings_html,
)
from traincast.app.pages.prediction import list_step_parts, make_detail_sections
from traincast.app.pages.provenance import make_software_section
from traincast.planner.what_if.advice import Advice
from traincast.planner.what_if.compare import answer_what_if
from traincast.planner.what_if.money import Prices
from traincast.planner.what_if.result import WhatIf
from traincast.planner.what_if.sweeps.result import SweepResult
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.display.text import format_milliseconds
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path, read_document

_FAMILIES = 3  # of kernels, those with most time, that are tried twice as fast
_SAME = 1e-6  # of a step: the what-ifs of a prediction begin where it does
_ON_PATH = ("us_per_sample", "memory_gb")
_PRICED = ("dollars_per_million_samples", "gpu_hours_per_million_samples")
_HEADER = ("if", "ms per step", "per sample", "90 % interval", "$ per million samples", "certain", "")


def try_usual_edits(p: Prediction, price: float | None) -> list[WhatIf]:
    """What a step would gain if kernels, host, memory or links were twice as fast, or its launches one graph; nothing
    where the step cannot be predicted anew from its workload alone (under a loader, say)."""
    texts = [f"speed:{family}=2" for family in list(p.by_family)[:_FAMILIES] if family != "collective"]
    texts += ["memory-speed=2", "host-speed=2", "cuda-graph"] + (["link-speed=2"] if p.gpus > 1 else [])
    step = resolve(Scenario(workload=p.workload, on=p.platform, host=p.host_profile))
    found = []
    for text in texts:
        try:
            result = answer_what_if(step, [text], Prices(per_gpu_hour=price or None))
        except TraincastError:
            continue
        if abs(result.before.iteration - p.iteration) > _SAME * p.iteration:
            return []
        found.append(result)
    return sorted(found, key=lambda one: one.per_sample.ratio)


def make_what_ifs_html(results: Sequence[WhatIf]) -> Html:
    """What-ifs as a table, the largest gain first."""
    if not results:
        return Html("")
    note = "Each is simulated anew; gains do not add up. The interval leaves out the errors that both steps share."
    rows = [_make_what_if_row(result, " + ".join(result.edits)) for result in results]
    return join_blocks([
        make_heading("What if"), make_table(_HEADER, rows, right=(1, 2, 4), caption="What a change would bring"),
        make_paragraph(note, "note"),
    ])  # fmt: skip


def _make_what_if_row(result: WhatIf, name: str) -> tuple[str, ...]:
    change, dollars = result.per_sample, result.cost_after.to_dict()["dollars_per_million_samples"]
    low, high = change.ratio_interval
    return (
        name,
        format_milliseconds(result.after.iteration),
        f"{change.ratio - 1:+.1%}",
        f"{low - 1:+.1%} to {high - 1:+.1%}",
        "" if dollars is None else f"{dollars:,.4g}",
        "yes" if change.certain else "within the uncertainty",
        make_bar(max(1 - change.ratio, 0.0), 2),
    )


def make_what_if_page(result: WhatIf, price: float | None = None) -> Page:
    """A step before and after edits; `price` is dollars of a GPU and hour."""
    title = result.before.headline().split("\n")[0]
    known = [("Before", f"{format_milliseconds(result.before.iteration)} ms"), ("Verdict", result.verdict),
             ("Held up by, before", result.bottlenecks[0]), ("Held up by, after", result.bottlenecks[1])]  # fmt: skip
    blocks = [
        make_number_html(result.after.iteration, result.after.interval, "ms per step, after"),
        make_facts(known),
        make_table(
            _HEADER, [_make_what_if_row(result, " + ".join(result.edits))], right=(1, 2, 4), caption="The change"
        ),
        make_warnings_html(result.after.warnings),
    ]
    sections = [
        Section(key="answer", title="What it would bring", html=join_blocks(blocks)),
        _make_parts_section(result),
    ]
    sections += [section for section in make_detail_sections(result.after, price) if section.key != "why"]
    return Page(title=title, subtitle="what if: " + ", ".join(result.edits), sections=sections)


def _make_parts_section(result: WhatIf) -> Section:
    longest = max(result.before.iteration, result.after.iteration)
    stacks = [
        block
        for word, one in (("Before", result.before), ("After", result.after))
        for block in (make_heading(word), make_step_stack(list_step_parts(one), one.iteration, word, longest))
    ]
    largest = max((abs(after - before) for _, before, after in result.parts()), default=0.0) or 1.0
    rows = [
        (name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}",
         make_bar(abs(after - before) / largest, 3 if after > before else 2))
        for name, before, after in result.parts()
    ]  # fmt: skip
    changed = make_table(
        ("part", "before, ms", "after, ms", "change, ms", ""), rows, right=(1, 2, 3), caption="What changes"
    )
    return Section(key="why", title="Why", html=join_blocks([*stacks, make_heading("What changes"), changed]))


def make_advice_page(advice: Advice, price: float | None = None) -> Page:
    """The step as it is, and the edits that would make it faster; `price` is dollars of a GPU and hour."""
    before = advice.before
    rows = [
        (*_make_what_if_row(one.answer, " + ".join(one.answer.edits))[:6], one.risk, make_bar(max(one.gain, 0.0), 2))
        for one in advice.suggestions
    ]
    why = [f"{' + '.join(one.answer.edits)}: {one.why}" for one in advice.suggestions if one.why]
    refused = list(advice.refused.items())
    blocks = [
        make_number_html(before.iteration, before.interval),
        *(make_paragraph(text) for text in why),
        make_table(
            (*_HEADER[:6], "risk", ""), rows, right=(1, 2, 4), caption="Changes that would help, the largest first"
        ),
        make_paragraph(f"Of no use: {', '.join(advice.useless) or 'none'}.", "note"),
        fold_block(
            f"edits that do not apply ({len(refused)})", make_table(("edit", "why not"), refused, caption="Not applied")
        ),
    ]
    html = join_blocks([make_verdict_html(before.trust), *blocks])
    sections = [Section(key="answer", title="What would help", html=html)]
    sections += make_detail_sections(before, price)
    return Page(title=before.headline().split("\n")[0], subtitle="advice", sections=sections)


def make_sweep_page(result: SweepResult, price: float | None = None) -> Page:
    """The page of a sweep; prices are part of it already."""
    return _build_sweep_page(result.to_dict() | {"rows": result.rows})


def read_sweep_page(path: Path) -> Page:
    """The page of what `sweep` printed as JSON into a file."""
    document = read_document(path)
    where = format_path(path)
    names = ("axes", "pareto", "rows", "failures")
    if not isinstance(document, dict) or any(name not in document for name in names):
        raise TraincastError(f"'{where}' is no sweep: it needs {', '.join(names)}")
    lists = [document[name] for name in names[1:]]
    axes = document["axes"]
    if not isinstance(axes, dict) or not all(isinstance(values, list) for values in axes.values()):
        raise TraincastError(f"'{where}' is no sweep: axes have to be lists of values")
    if not all(isinstance(r, list) and all(isinstance(x, dict) for x in r) for r in lists):
        raise TraincastError(f"'{where}' is no sweep: rows have to be objects")
    if not all(isinstance(document.get(name, 0), int) for name in ("points", "failed")):
        raise TraincastError(f"'{where}' is no sweep: points and failed have to be integers")
    for row in [*document["pareto"], *document["rows"]]:
        priced = [row[name] for name in _PRICED if row.get(name) is not None]
        if not row.get("error") and not all(isinstance(x, int | float) for x in (*map(row.get, _ON_PATH), *priced)):
            raise TraincastError(f"'{where}': a row needs numbers {', '.join((*_ON_PATH, *_PRICED))}, or an error")
    return _build_sweep_page(document)


def _build_sweep_page(document: Mapping[str, Any]) -> Page:
    rows, best, failed = document["rows"], document["pareto"], document["failures"]
    axes = [f"{name}: {', '.join(str(v) for v in values[:12])}" for name, values in document["axes"].items()]
    shown = [{name: value for name, value in row.items() if value is not None} for row in best]
    known = [("Points", f"{document.get('points', len(rows)):,}"),
             ("Failed", f"{document.get('failed', len(failed)):,}"),
             ("Best of all goals", f"{len(best):,}")]  # fmt: skip
    blocks = [make_facts(known), make_table(("axis",), [(axis,) for axis in axes], caption="What was varied")]
    charts = {}
    good = [row for row in rows or best if not row.get("error")]
    if good:
        charts["sweep"] = make_sweep_chart(good, best)
        blocks.append(make_chart("sweep", "Microseconds a sample over its cost; the best of both are told apart",
                            "Cost is dollars of a million samples, or GPU hours without a price."))  # fmt: skip
    blocks.append(make_records_table(shown, "Points that no other beats in time, cost and memory at once"))
    sections = [Section(key="answer", title="The best points", html=join_blocks(blocks), charts=charts)]
    if failed:
        sections.append(Section(key="failed", title="Points that could not be predicted",
                                html=make_records_table(failed, "Failed points")))  # fmt: skip
    sections.append(Section(key="rows", title="Every point", html=make_records_table(rows, "Points of the sweep")))
    sections.append(make_software_section([("Workers", str(document.get("workers", "")))]))
    name = str(document.get("workload", "workload"))
    return Page(title=f"Sweep of {name}", subtitle=f"{len(rows):,} points", sections=sections)


def make_sweep_chart(rows: Sequence[Mapping[str, Any]], best: Sequence[Mapping[str, Any]]) -> Chart:
    """Time of a sample over its cost, both logarithmic; points that nothing beats are a series of their own."""
    marked = {_make_identity(row) for row in best}
    points = sorted((_make_cost_table(row), float(row["us_per_sample"]), _make_identity(row) in marked) for row in rows)
    points = [point for point in points if point[0] > 0 and point[1] > 0]
    return {
        "x": [float(f"{x:.5g}") for x, _, _ in points], "x_label": "cost of a million samples", "log_x": True,
        "y_label": "us per sample", "log_y": True,
        "series": [
            {"label": "others", "y": [None if on else y for _, y, on in points], "kind": "points", "slot": 7},
            {"label": "the best", "y": [y if on else None for _, y, on in points], "kind": "points", "slot": 1},
        ],
    }  # fmt: skip


def _make_identity(row: Mapping[str, Any]) -> str:
    return repr(sorted((name, value) for name, value in row.items() if isinstance(value, str | int | float)))


def _make_cost_table(row: Mapping[str, Any]) -> float:
    dollars = row.get("dollars_per_million_samples")
    return float(row.get("gpu_hours_per_million_samples") or 0.0) if dollars is None else float(dollars)

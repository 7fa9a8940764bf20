"""Pages of decisions: a what-if, advice, a sweep; and the what-ifs that stand on the page of every prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from traincast.app.pages.charts import Chart
from traincast.app.pages.page import (
    Html,
    Page,
    Section,
    Tile,
    fold_block,
    join_blocks,
    make_bar,
    make_chart,
    make_heading,
    make_paragraph,
    make_table,
)
from traincast.app.pages.parts import (
    format_number,
    make_bound_tile,
    make_memory_tile,
    make_records_table,
    make_software_section,
    make_step_stack,
    make_step_tile,
    make_verdict_html,
    make_warnings_html,
)
from traincast.app.pages.prediction import list_step_parts, make_detail_sections
from traincast.planner.what_if.advice import Advice
from traincast.planner.what_if.money import Prices
from traincast.planner.what_if.result import WhatIf, answer_what_if
from traincast.planner.what_if.sweeps.result import SweepResult
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.display.text import format_dollars, format_duration, format_milliseconds
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path, read_document

_FAMILIES = 3  # of kernels, those with most time, that are tried twice as fast
_SAME = 1e-6  # of a step: the what-ifs of a prediction begin where it does
_ON_PATH = ("us_per_sample", "memory_gb")
_PRICED = ("dollars_per_million_samples", "gpu_hours_per_million_samples")
_SWEEP_COLUMNS = ("iteration_ms", "low_ms", "high_ms", "us_per_sample", "samples_per_s", "memory_gb",
                  "dollars_per_million_samples", "gpu_hours_per_million_samples")  # fmt: skip
_GOALS: tuple[tuple[str, str, Callable[[float], str], str], ...] = (
    ("Fastest", "us_per_sample", lambda us: format_duration(1e-6 * us), "per sample, "),
    ("Cheapest", "dollars_per_million_samples", format_dollars, "per million samples, "),
    ("Least GPU time", "gpu_hours_per_million_samples", lambda h: format_duration(3600 * h), "per million samples, "),
    ("Least memory", "memory_gb", lambda gb: f"{format_number(gb)} GB", ""),
)
_LONG = 4.0  # most over least from which on a scale is logarithmic
_MOST_SERIES = 12  # of a chart: as many as there are colours
_HEADER = ("if", "ms per step", "per sample", "90 % interval", "$ / M samples", "certain", "")


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
        make_heading("What if"), make_table(_HEADER, rows, right=(1, 2, 3, 4), caption="What a change would bring"),
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
        "" if dollars is None else format_dollars(dollars),
        "yes" if change.certain else "no",
        make_bar(max(1 - change.ratio, 0.0), 2),
    )


def make_what_if_page(result: WhatIf, price: float | None = None) -> Page:
    """A step before and after edits; `price` is dollars of a GPU and hour."""
    title = result.before.headline().split("\n")[0]
    stacks, changed = _make_parts_html(result)
    blocks = [
        make_paragraph(f"{result.verdict[0].upper()}{result.verdict[1:]}."),
        make_verdict_html(result.after.trust),
        make_table(
            _HEADER, [_make_what_if_row(result, " + ".join(result.edits))], right=(1, 2, 3, 4), caption="The change"
        ),
        stacks,
        make_warnings_html(result.after.warnings),
    ]
    sections = [
        Section(key="answer", title="What it would bring", html=join_blocks(blocks)),
        Section(key="why", title="Why", html=changed),
    ]
    sections += [section for section in make_detail_sections(result.after, price) if section.key != "why"]
    subtitle = f"What if: {', '.join(result.edits)}"
    return Page(title=title, subtitle=subtitle, sections=sections, tiles=_make_change_tiles(result))


def _make_change_tiles(result: WhatIf) -> list[Tile]:
    change, (first, second) = result.per_sample, result.bottlenecks
    times = 1 / change.ratio if change.ratio < 1 else change.ratio
    low, high = (f"{limit - 1:+.0%}" for limit in change.ratio_interval)
    sure = "certain" if change.certain else "within the uncertainty"
    moved = f"was {first}" if first != second else "as before"
    return [
        make_step_tile(result.after, "One step, after"),
        Tile("Change", f"{times:.2f} times as {'fast' if change.ratio < 1 else 'long'}",
             f"from {format_duration(result.before.iteration)}; a sample {low} to {high}, {sure}",
             ("good" if change.ratio < 1 else "poor") if change.certain else ""),
        Tile("Bound by", second, moved),
        make_memory_tile(result.after),
    ]  # fmt: skip


def _make_parts_html(result: WhatIf) -> tuple[Html, Html]:
    """Both steps by what they are spent on, and what changes."""
    longest = max(result.before.iteration, result.after.iteration)
    stacks = [
        block
        for word, one in (("Before", result.before), ("After", result.after))
        for block in (make_heading(word), make_step_stack(list_step_parts(one), one.iteration, word, longest))
    ]
    largest = max((abs(after - before) for _, before, after in result.parts()), default=0.0) or 1.0
    rows = [
        (name, format_number(before), format_number(after), f"{'+' if after > before else '-'}"
         f"{format_number(abs(after - before))}", make_bar(abs(after - before) / largest, 3 if after > before else 2))
        for name, before, after in result.parts() if abs(after - before) > _SAME * largest
    ]  # fmt: skip
    header = ("part", "before, ms", "after, ms", "change, ms", "")
    return join_blocks(stacks), make_table(header, rows, right=(1, 2, 3), caption="What changes")


def make_advice_page(advice: Advice, price: float | None = None) -> Page:
    """The step as it is, and the edits that would make it faster; `price` is dollars of a GPU and hour."""
    before = advice.before
    rows = [
        (
            *_make_what_if_row(one.answer, " + ".join(one.answer.edits))[:6],
            "" if one.answer.after.fits else "does not fit",
            one.risk,
            make_bar(max(one.gain, 0.0), 2),
        )
        for one in advice.suggestions
    ]
    why = [f"{' + '.join(one.answer.edits)}: {one.why}" for one in advice.suggestions if one.why]
    refused = list(advice.refused.items())
    blocks = [
        *(make_paragraph(text) for text in why),
        make_table(
            (*_HEADER[:6], "memory", "risk", ""),
            rows,
            right=(1, 2, 3, 4),
            caption="Changes that would help, the largest first",
        ),
        make_paragraph(f"Of no use: {', '.join(advice.useless) or 'none'}.", "note"),
        fold_block(
            f"edits that do not apply ({len(refused)})", make_table(("edit", "why not"), refused, caption="Not applied")
        ),
    ]
    html = join_blocks([make_verdict_html(before.trust), *blocks])
    sections = [Section(key="answer", title="What would help", html=html, wide=True)]
    sections += make_detail_sections(before, price)
    first = advice.suggestions[0] if advice.suggestions else None
    help = Tile("Helps most", "nothing tried" if first is None else " + ".join(first.answer.edits),
                "" if first is None else f"a sample {-first.gain:+.0%}", "good" if first else "")  # fmt: skip
    tiles = [make_step_tile(before), help, make_bound_tile(before), make_memory_tile(before)]
    return Page(title=before.headline().split("\n")[0], subtitle="What would help", sections=sections, tiles=tiles)


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
    names = list(document["axes"])
    axes = "; ".join(f"{name}: {', '.join(str(v) for v in values[:12])}" for name, values in document["axes"].items())
    columns = [*names, *_SWEEP_COLUMNS]
    shown = [{name: row[name] for name in columns if row.get(name) is not None} for row in best]
    blocks, charts = [], {}
    good = [row for row in rows or best if not row.get("error")]
    if good:
        charts["sweep"] = make_sweep_chart(good, best, names)
        blocks.append(make_chart("sweep", "Microseconds per sample of every point; those that none beats are filled",
                            "Filled: no other point beats it in time, cost and memory at once."))  # fmt: skip
    blocks.append(make_records_table(shown, "Points that no other beats in time, cost and memory at once"))
    sections = [Section(key="answer", title="The best points", html=join_blocks(blocks), charts=charts, wide=True)]
    if failed:
        sections.append(Section(key="failed", title="Points that could not be predicted",
                                html=make_records_table(failed, "Failed points"), wide=True))  # fmt: skip
    flat = [{name: value for name, value in row.items() if name != "prediction"} for row in rows]
    table = fold_block(f"every figure of these {len(rows):,} points", make_records_table(flat, "Points of the sweep"))
    sections.append(Section(key="rows", title="Every point", html=table, wide=True))
    sections.append(make_software_section([("Workers", str(document.get("workers", "")))]))
    points, wrong = document.get("points", len(rows)), document.get("failed", len(failed))
    tiles = [Tile("Points", f"{points:,}", f"{wrong:,} could not be predicted" if wrong else "all predicted")]
    for label, key, write, per in _GOALS:
        known = [row for row in good if isinstance(row.get(key), int | float) and row.get("fits", True)]
        if known:
            first = min(known, key=lambda row: float(row[key]))
            at = ", ".join(f"{name} {first.get(name)}" for name in names)
            tiles.append(Tile(label, write(float(first[key])), per + at))
    title = f"Sweep of {document.get('workload', 'workload')}"
    return Page(title=title, subtitle=axes, sections=sections, tiles=tiles[:4])


def make_sweep_chart(
    rows: Sequence[Mapping[str, Any]], best: Sequence[Mapping[str, Any]], axes: Sequence[str]
) -> Chart:
    """Time of a sample over its cost, logarithmic (cost where it varies enough): a series for every value of one axis,
    its points named by the others, those that nothing beats filled. Where cost is time alone (one price, one GPU),
    over memory."""
    marked = {_make_identity(row) for row in best}
    dollars = all(row.get("dollars_per_million_samples") is not None for row in rows)
    key = "dollars_per_million_samples" if dollars else "gpu_hours_per_million_samples"
    label = "$ per million samples" if dollars else "GPU hours per million samples"
    if _is_proportional([(float(row.get(key) or 0.0), float(row["us_per_sample"])) for row in rows]):
        key, label = "memory_gb", "GB on the fullest GPU"
    points = sorted(
        ((float(row.get(key) or 0.0), float(row["us_per_sample"]), row) for row in rows), key=lambda p: p[0]
    )
    points = [point for point in points if point[0] > 0 and point[1] > 0]
    told = _choose_series_axis(rows, axes)
    values = list(dict.fromkeys(str(row.get(told, "")) for row in rows))
    series = [
        {
            "label": f"{told} {value}".strip() or "points",
            "y": [y if str(row.get(told, "")) == value else None for _, y, row in points],
            "names": [", ".join(str(row.get(name, "")) for name in axes if name != told) for _, _, row in points],
            "filled": [_make_identity(row) in marked for _, _, row in points],
            "kind": "points",
            "slot": slot,
        }
        for slot, value in enumerate(values)
    ]
    return {
        "x": [float(f"{x:.5g}") for x, _, _ in points], "x_label": label,
        "log_x": bool(points) and points[-1][0] > _LONG * points[0][0],
        "y_label": "us per sample", "log_y": True, "series": series,
    }  # fmt: skip


def _choose_series_axis(rows: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> str:
    """The axis that colours tell apart: platforms, or the first with few values; "" where there is one axis."""
    few = [name for name in axes if len({str(row.get(name, "")) for row in rows}) <= _MOST_SERIES]
    return "" if len(axes) < 2 or not few else "on" if "on" in few else few[0]


def _is_proportional(pairs: Sequence[tuple[float, float]]) -> bool:
    ratios = [x / y for x, y in pairs if x > 0 and y > 0]
    return len(ratios) > 1 and max(ratios) < 1.01 * min(ratios)


def _make_identity(row: Mapping[str, Any]) -> str:
    return repr(sorted((name, value) for name, value in row.items() if isinstance(value, str | int | float)))

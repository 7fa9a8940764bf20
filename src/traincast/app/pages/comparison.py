"""The page of two traced runs: what changed between them, and both timelines one under the other."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.app.pages.elements import (
    fold_block,
    join_blocks,
    make_bar,
    make_chart,
    make_heading,
    make_table,
)
from traincast.app.pages.measured import PART_WORDS
from traincast.app.pages.page import Page, Section, Tile
from traincast.app.pages.parts import make_step_stack
from traincast.app.pages.provenance import make_software_section
from traincast.app.pages.timelines import make_timeline_data
from traincast.app.report.measured_chrome import make_measured_chrome_trace
from traincast.traces.breakdown import PARTS
from traincast.traces.replay.compare import Change, TraceComparison, compare_reports
from traincast.traces.replay.results import TraceReport
from traincast.utils.display.text import format_duration, format_milliseconds


def make_comparison_page(before: TraceReport, after: TraceReport) -> Page:
    """The page of a traced run (`after`) alongside another (`before`), by the mean steps of their slowest ranks."""
    compared = compare_reports(before, after)
    old, new = compared.names
    sections = [_make_why_section(compared), _make_timelines_section(before, after)]
    sections.append(make_software_section([("Before", old), ("After", new)]))
    subtitle = f"{new} against {old}"
    return Page(title="Two traced runs", subtitle=subtitle, sections=sections, tiles=_make_tiles(compared))


def _make_tiles(compared: TraceComparison) -> list[Tile]:
    before, after = compared.step
    change, kernels = after - before, compared.kernels
    largest = max(compared.parts, key=lambda part: abs(part.change))
    return [
        Tile("One step, after", format_duration(after), f"mean; before {format_duration(before)}"),
        Tile("Change", f"{change / (before or 1.0):+.1%}", f"{format_duration(abs(change))} "
             f"{'longer' if change > 0 else 'shorter'}", "poor" if change > 0 else "good"),
        Tile("Most of it", PART_WORDS[largest.name], f"{1e3 * largest.change:+.3g} ms"),
        Tile("Kernels per step", f"{kernels[1]:,}", f"before {kernels[0]:,}"),
    ]  # fmt: skip


def _make_why_section(compared: TraceComparison) -> Section:
    """Both steps by what they were spent on, and what changed, the largest change first."""
    stacks = [
        block
        for at, word in enumerate(("Before", "After"))
        for block in (
            make_heading(word),
            make_step_stack(_list_parts(compared, at), compared.step[at], word, max(compared.step)),
        )
    ]
    changes = [
        _make_changes_table("what", compared.parts, "The step by what it was spent on"),
        _make_changes_table("family", compared.families, "Kernel time by family"),
        fold_block("by op and shape", _make_changes_table("op", compared.ops, "Kernel time by op and shape")),
        fold_block("on the host", _make_changes_table("op", compared.host, "Host time by top-level op")),
    ]
    html = join_blocks([*stacks, make_heading("What changed"), *changes])
    return Section(key="answer", title="Why", html=html, wide=True)


def _list_parts(compared: TraceComparison, at: int) -> list[tuple[str, float]]:
    seconds = {change.name: (change.before, change.after)[at] for change in compared.parts}
    return [(PART_WORDS[name], seconds[name]) for name in PARTS]


def _make_changes_table(what: str, changes: Sequence[Change], caption: str, most: int = 20) -> str:
    largest = max((abs(change.change) for change in changes), default=0.0) or 1.0
    rows = [
        (
            f"{PART_WORDS.get(c.name, c.name)} {c.shapes}".strip(),
            format_milliseconds(c.before),
            format_milliseconds(c.after),
            f"{1e3 * c.change:+.3f}",
            "" if c.share is None else f"{c.share:.0%}",
            make_bar(abs(c.change) / largest, 3 if c.change > 0 else 2),
        )
        for c in changes[:most]
    ]
    header = (what, "before, ms", "after, ms", "change, ms", "of the difference", "")
    return make_table(header, rows, right=(1, 2, 3, 4), caption=caption)


def _make_timelines_section(before: TraceReport, after: TraceReport) -> Section:
    charts = {
        key: make_timeline_data(make_measured_chrome_trace(report), skipped=("replayed",), most=30_000)
        for key, report in (("timeline-before", before), ("timeline-after", after))
    }
    html = join_blocks([
        make_heading("Before"), make_chart("timeline-before", "Timeline before"),
        make_heading("After"), make_chart("timeline-after", "Timeline after"),
    ])  # fmt: skip
    return Section(key="timeline", title="Timelines", html=html, charts=charts, wide=True)

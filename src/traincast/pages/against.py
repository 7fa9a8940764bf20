"""The page of two traced runs: what changed between them, and both timelines one under the other."""

from __future__ import annotations

from traincast.display.text import milliseconds
from traincast.pages.elements import bar, chart, facts, folded, heading, joined, table
from traincast.pages.measured import PART_WORDS, slowest_rank
from traincast.pages.page import Page, Section
from traincast.pages.parts import number_html, step_stack
from traincast.pages.provenance import software_section
from traincast.pages.timelines import timeline_data
from traincast.replay.results import RankReport, TraceReport
from traincast.report.measured_chrome import measured_chrome_trace
from traincast.traces.breakdown import PARTS


def against_page(before: TraceReport, after: TraceReport) -> Page:
    """The page of a traced run (`after`) beside another (`before`), by the median steps of their slowest ranks."""
    old, new = slowest_rank(before), slowest_rank(after)
    sections = [_answer(old, new), _why(old, new), _timelines(before, after)]
    sections.append(software_section([("Before", old.linked.trace.path.name), ("After", new.linked.trace.path.name)]))
    names = f"{new.linked.trace.path.name} against {old.linked.trace.path.name}"
    return Page(title="Two traced runs", subtitle=names, sections=sections)


def _answer(old: RankReport, new: RankReport) -> Section:
    before, after = old.median_step.step, new.median_step.step
    known = [
        ("Before", f"{milliseconds(before)} ms"), ("Change", f"{milliseconds(abs(after - before))} ms "
         f"{'longer' if after > before else 'shorter'} ({after / (before or 1.0) - 1:+.1%})"),
        ("Kernels a step", f"{old.median_step.kernels:,}, now {new.median_step.kernels:,}"),
    ]  # fmt: skip
    html = joined([number_html(after, None, "ms a step, median, after"), facts(known)])
    return Section(key="answer", title="How long", html=html)


def _why(old: RankReport, new: RankReport) -> Section:
    """Both steps by what they were spent on, and what changed, the largest change first."""
    stacks = [
        piece
        for word, rank in (("Before", old), ("After", new))
        for piece in (
            heading(word),
            step_stack(_parts(rank), rank.median_step.step, word),
        )
    ]  # fmt: skip
    changes = [
        _changes("what", dict(_parts(old)), dict(_parts(new)), "The step by what it was spent on"),
        _changes("family", old.median_step.by_family, new.median_step.by_family, "Kernel time by family"),
        folded("by op", _changes("op", old.median_step.by_op, new.median_step.by_op, "Kernel time by op")),
    ]  # fmt: skip
    return Section(key="why", title="Why", html=joined([*stacks, heading("What changed"), *changes]))


def _parts(rank: RankReport) -> list[tuple[str, float]]:
    return [(PART_WORDS[name], float(getattr(rank.median_step, name))) for name in PARTS]


def _changes(what: str, old: dict[str, float], new: dict[str, float], caption: str, most: int = 20) -> str:
    names = sorted({**old, **new}, key=lambda name: -abs(new.get(name, 0.0) - old.get(name, 0.0)))[:most]
    largest = max((abs(new.get(name, 0.0) - old.get(name, 0.0)) for name in names), default=0.0) or 1.0
    rows = []
    for name in names:
        change = new.get(name, 0.0) - old.get(name, 0.0)
        rows.append((name, milliseconds(old.get(name, 0.0)), milliseconds(new.get(name, 0.0)), f"{1e3 * change:+.3f}",
                     bar(abs(change) / largest, 3 if change > 0 else 2)))  # fmt: skip
    return table((what, "before, ms", "after, ms", "change, ms", ""), rows, right=(1, 2, 3), caption=caption)


def _timelines(before: TraceReport, after: TraceReport) -> Section:
    charts = {
        key: timeline_data(measured_chrome_trace(report), skipped=("replayed",), most=30_000)
        for key, report in (("timeline-before", before), ("timeline-after", after))
    }
    html = joined([
        heading("Before"), chart("timeline-before", "Timeline before"),
        heading("After"), chart("timeline-after", "Timeline after"),
    ])  # fmt: skip
    return Section(key="timeline", title="Timelines", html=html, charts=charts)

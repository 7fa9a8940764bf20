"""Pages of measured traces, one run or two: the step, why it took so long, the timeline, gains, and where a prediction
errs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from traincast.app.pages.charts import MOST_SLICES, make_timeline_data, make_traced_memory_chart
from traincast.app.pages.page import (
    Html,
    Page,
    Section,
    Tile,
    fold_block,
    join_blocks,
    make_bar,
    make_chart,
    make_facts,
    make_heading,
    make_paragraph,
    make_table,
)
from traincast.app.pages.parts import (
    NO_PRICE,
    format_number,
    make_records_table,
    make_seconds_table,
    make_software_section,
    make_step_stack,
    make_warnings_html,
)
from traincast.app.report.compared import SHOWN_GAIN, state_traces
from traincast.app.report.measured_chrome import make_measured_chrome_trace
from traincast.app.report.measured_profile import (
    ProfileTable,
    make_communication_cells,
    make_profile_tables,
    make_shared_communication_cells,
)
from traincast.traces.breakdown import PARTS
from traincast.traces.replay.compare import Change, TraceComparison, compare_reports, find_slowest_rank
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.utils.display.text import count_of, format_duration, format_interval, format_milliseconds, shorten_name

PART_WORDS = {
    "compute": "computing",
    "exposed_comm": "exposed communication",
    "host_bound": "idle: waiting for the host",
    "synchronised": "idle: the host had waited for the device",
    "event_wait": "idle: streams wait for each other",
    "launch_latency": "idle: launched, not begun",
    "graph_nodes": "idle: between nodes of a graph",
    "not_recorded": "idle: the reason was not recorded",
}
"""The parts of a measured step in words."""
_MOST_GAINS = 15
_LEAST_SHOWN = 5e-7  # seconds: less reads 0.000 ms


def make_trace_page(report: TraceReport, price: float | None = None) -> Page:
    """The page of one traced run; `price` is dollars of a GPU and hour."""
    rank = find_slowest_rank(report)
    many, what = len(report.ranks), "rank" if report.is_one_job else "trace"
    several = f", the slowest of {count_of(many, what)}" if many > 1 else ""
    device = rank.linked.trace.device_name or "unknown device"
    sections = [make_result_section(report), make_why_section(report), make_kernels_section(rank)]
    sections += [make_ranks_section(report)] if len(report.ranks) > 1 else []
    sections += [make_gains_section(report, price)] if rank.linked.launched else []
    sections.append(make_timeline_section(report))
    sections += [make_overheads_section(rank)] if rank.overheads.table else []
    sections += [
        *make_attribution_sections(rank),
        *make_collectives_sections(report, rank),
        *make_profile_sections(rank),
    ]
    sections.append(make_software_section([
        ("Files", ", ".join(one.linked.trace.path.name for one in report.ranks)), ("Device", device),
        ("Marked steps", _list_marks(rank)),
    ]))  # fmt: skip
    name = rank.linked.trace.path.name.partition(".")[0]
    title, subtitle = f"Traced steps of {name}", f"measured on {device}{several}"
    return Page(title=title, subtitle=subtitle, sections=sections, tiles=_make_tiles(rank))


def _make_tiles(rank: RankReport) -> list[Tile]:
    step, lengths = rank.median_step, sorted(one.step for one in rank.steps)
    idle = max(PARTS[1:], key=lambda name: float(getattr(step, name)))
    share = float(getattr(step, idle)) / (step.step or 1.0)
    spread = f"median; {format_interval((lengths[0], lengths[-1]))} over {len(lengths)} steps"
    told = spread if len(lengths) > 1 else "the only one in the trace"
    gain = max(rank.path.faster.items(), key=lambda pair: pair[1], default=("", 0.0))
    return [
        Tile("One step, measured", format_duration(step.step), told),
        Tile("Device busy", f"{step.active / (step.step or 1.0):.0%}", f"{PART_WORDS[idle]} {share:.0%}"),
        Tile("On the critical path", rank.path.most or "not known",
             f"{rank.path.by_what[rank.path.most]:.0%} of it" if rank.path.most else ""),
        Tile("Helps most", shorten_name(gain[0], 32) or "nothing", f"twice as fast saves {gain[1]:.0%} of the step"),
    ]  # fmt: skip


def _list_marks(rank: RankReport) -> str:
    if rank.linked.period:
        return "no: told by the sequence of kernels"
    return "yes" if rank.linked.marked else "no: the whole trace counts as one"


def make_result_section(report: TraceReport) -> Section:
    """The measured step, how it varies, how well replay and prediction agree with it, and its kernels."""
    rank = find_slowest_rank(report)
    furthest = max(abs(replayed.error) for replayed in rank.replay.steps)
    known = [
        ("Kernels a step", f"{rank.median_step.kernels:,}"),
        ("Replayed within", f"{furthest:.1%}"),
    ]
    blocks = [make_paragraph(line) for line in state_traces(report)]
    if rank.attribution:
        blocks.insert(0 if rank.attribution.is_forecast else len(blocks), _make_predicted_line(rank))
    shared = report.together.notes if report.together and report.is_one_job else ()
    others = dict.fromkeys(f"rank {one.rank}: {note}" for one in report.ranks if one is not rank for note in one.notes)
    blocks += [make_facts(known), make_warnings_html(dict.fromkeys([*rank.notes, *shared]))]
    blocks += [fold_block(f"notes of the other ranks ({len(others)})", make_warnings_html(others))] if others else []
    return Section(key="answer", title="Verdict", html=join_blocks(blocks))


def make_kernels_section(rank: RankReport) -> Section:
    """Kernel time of the median step by family and op."""
    median = rank.median_step
    table = make_seconds_table("family", median.by_family, "Kernel time by family")
    by_op = fold_block("by op", make_seconds_table("op", median.by_op, "Kernel time by op"))
    return Section(key="kernels", title="Kernels", html=join_blocks([table, by_op]))


def _make_predicted_line(rank: RankReport) -> Html:
    assert rank.attribution is not None
    attribution = rank.attribution
    low, high = map(format_milliseconds, attribution.interval)
    if attribution.is_forecast:
        error = f"a forecast from {attribution.traced}"
    else:
        error = f"geometric mean error of {len(attribution.steps)} steps {attribution.gmae:.1%}"
    return make_paragraph(
        f"Predicted on {attribution.platform}: {format_milliseconds(attribution.mean_step)} ms "
        f"({low} to {high}, 90 %), "
        f"{error}; {attribution.kernels.modelled:.0%} of kernel time is modelled.",
        "interval",
    )


def make_ranks_section(report: TraceReport) -> Section:
    """The median step of every rank."""
    rows = []
    for rank in report.ranks:
        step = rank.median_step
        rows.append(
            (
                str(rank.rank),
                format_milliseconds(step.step),
                format_milliseconds(step.compute),
                format_milliseconds(step.exposed_comm),
                format_milliseconds(step.idle),
                make_bar(step.active / (step.step or 1.0)),
            )
        )
    header = ("rank", "ms per step", "computing, ms", "exposed, ms", "idle, ms", "device active")
    return Section(key="ranks", title="Ranks", html=make_table(header, rows, right=range(5), caption="Median steps"))


def make_why_section(report: TraceReport) -> Section:
    """The median step of the slowest rank by what it was spent on, and its critical path."""
    rank = find_slowest_rank(report)
    step = rank.median_step
    parts = [(PART_WORDS[name], float(getattr(step, name))) for name in PARTS]
    blocks = [make_step_stack(parts, step.step, f"Step {step.number} of rank {rank.rank}")]
    if rank.path.by_what:
        blocks += [
            make_heading("What holds the step up"),
            _make_shares_table("on the critical path", rank.path.by_what, "The critical path by what it is spent on"),
            fold_block("by op", _make_shares_table("op", rank.path.by_op, "The critical path by op")),
        ]
    return Section(key="why", title="Why", html=join_blocks(blocks))


def _make_shares_table(what: str, shares: dict[str, float], caption: str) -> Html:
    ranked = sorted(shares.items(), key=lambda item: -item[1])[:_MOST_GAINS]
    largest = max(shares.values(), default=0.0) or 1.0
    return make_table(
        (what, "share", ""),
        [(name or "between ops", f"{share:.1%}", make_bar(share / largest)) for name, share in ranked],
        right=(1,),
        caption=caption,
    )


def make_timeline_section(report: TraceReport) -> Section:
    """Measured and, where the run was predicted, predicted timelines, one under the other."""
    document = make_measured_chrome_trace(report)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    note = "Times count from the first step; the critical path is the thick line."
    if len(slices) > MOST_SLICES:
        low, high = _cut_window(report)
        document = {"traceEvents": [e for e in document["traceEvents"] if e["ph"] == "M" or _is_inside(e, low, high)]}
        note = f"The trace is long: one step is shown. {note}"
    data = make_timeline_data(document, skipped=("replayed",))
    html = make_chart("timeline", "Timeline of the traced run, per rank, host thread and stream", note)
    return Section(key="timeline", title="Timeline", html=html, charts={"timeline": data}, wide=True)


def _cut_window(report: TraceReport) -> tuple[float, float]:
    """The median step of the slowest rank, microseconds from the trace's first step."""
    rank = find_slowest_rank(report)
    number = rank.steps.index(rank.median_step)
    step = rank.linked.steps[number]
    return 1e-3 * (step.start - rank.replay.origin), 1e-3 * (step.end - rank.replay.origin)


def _is_inside(event: dict[str, Any], low: float, high: float) -> bool:
    return bool(event["ph"] == "X" and event["ts"] < high and event["ts"] + event["dur"] > low)


def make_gains_section(report: TraceReport, price: float | None) -> Section:
    """What a step would gain if something were twice as fast, with money where a price is known."""
    rank = find_slowest_rank(report)
    gpus, step = len(report.ranks), rank.median_step.step
    hourly = None if price is None else price * gpus
    largest = max(rank.path.faster.values(), default=0.0) or 1.0
    rows = []
    for name, gain in [item for item in rank.path.faster.items() if item[1] >= SHOWN_GAIN][:_MOST_GAINS]:
        saved = "" if hourly is None else f"{gain * hourly:,.2f}"
        rows.append((name, format_milliseconds(gain * step), f"{gain:.1%}", saved, make_bar(gain / largest)))
    caption = "What a step would gain if this took half as long"
    blocks = [
        make_table(
            ("twice as fast", "ms saved", "of the step", "$ an hour", ""), rows, right=(1, 2, 3), caption=caption
        ),
        make_paragraph(
            "Gains are found by simulating the step again: what is not on the critical path, or stops being on it, "
            "gains nothing. They do not add up.",
            "note",
        ),
    ]
    if price is None:
        blocks.append(make_paragraph(NO_PRICE, "note"))
    return Section(key="what-if", title="What if", html=join_blocks(blocks))


def make_attribution_sections(rank: RankReport) -> list[Section]:
    """Where the error of the prediction comes from."""
    attribution = rank.attribution
    if attribution is None:
        return []
    steps = [
        {"step": step.number, "measured_ms": 1e3 * step.measured, "predicted_ms": 1e3 * step.full,
         f"{attribution.difference}_%": round(100 * step.error, 2),
         **{f"{'simulation' if name == 'walk' else name}_%": round(100 * share, 2)
            for name, share in step.compute_shares().items()}}
        for step in attribution.steps
    ]  # fmt: skip
    families = [
        {"family": name, "measured_ms": 1e3 * m, "predicted_ms": 1e3 * p,
         "changes_the_step_by_ms": 1e3 * attribution.change_by_family.get(name, 0.0)}
        for name, (m, p) in attribution.sum_by_family().items()
    ]  # fmt: skip
    kinds = [
        {"overhead": name, "measured_ms": 1e3 * m, "predicted_ms": 1e3 * p,
         "changes_the_step_by_ms": 1e3 * attribution.change_by_type.get(name, 0.0)}
        for name, (m, p) in attribution.sum_by_type().items()
    ]  # fmt: skip
    blocks = [
        make_paragraph(
            "The step simulated as measured, then with predicted kernels, then with pooled host overheads too: each "
            f"difference is one share, and together they are the {attribution.difference}."
        ),
        make_records_table(steps, f"{attribution.difference.capitalize()} of every step and its shares"),
        make_records_table(families, "Kernels a step by family"),
        make_records_table(kinds, "Host overheads per step by type"),
    ]
    title = "From one GPU to the other" if attribution.is_forecast else "Where the prediction errs"
    return [Section(key="errors", title=title, html=join_blocks(blocks))]


def make_overheads_section(rank: RankReport) -> Section:
    """What the host spends around ops, by the five types."""
    rows = rank.to_dict()["overheads_us"]
    flat = [{"type": kind, "op": op, **summary} for kind, ops in rows.items() for op, summary in ops.items()]
    ranked = sorted(flat, key=lambda row: -row["count"] * row["mean"])[:_MOST_GAINS]
    longest = [
        (row["type"], row["op"], f"{row['count']:,}", format_number(row["median"]), format_number(row["p95"]))
        for row in ranked
    ]
    html = join_blocks(
        [
            make_paragraph(
                "T1 is between two ops, T2 before an op's first launch, T3 after its last, T4 is a runtime call, "
                "T5 is between launches."
            ),
            make_table(
                ("type", "op", "count", "median, us", "95 % below, us"),
                longest,
                right=(2, 3, 4),
                caption="Host overheads with most time",
            ),
            fold_block(f"all overheads ({len(flat)})", make_records_table(flat, "Host overheads, microseconds")),
        ]
    )
    return Section(key="host", title="What the host does", html=html)


_MOST_ROWS = 25  # of a table: a page is for reading; the JSON and `records` have them all


def make_profile_sections(rank: RankReport) -> list[Section]:
    """Kernels, rates, modules, annotations, graphs, launches and memory; the first table open, the others behind their
    titles."""
    tables = make_profile_tables(rank, _MOST_ROWS)
    if not tables:
        return []
    blocks = [make_paragraph(f"Of rank {rank.rank}; times and counts are of one step."), _make_shown_table(tables[0])]
    blocks += [fold_block(f"{one.title} ({one.count:,})", _make_shown_table(one)) for one in tables[1:]]
    charts = make_traced_memory_chart(rank.profile.memory_curve)
    if charts:
        label = "Allocated device memory over the traced steps"
        blocks.append(make_chart("memory", label, "As the profiler recorded it; of long traces the highest points."))
    html = join_blocks(blocks)
    return [Section(key="profile", title="Profile", html=html, charts={"memory": charts} if charts else {})]


def make_collectives_sections(report: TraceReport, rank: RankReport) -> list[Section]:
    """Collectives with the bandwidth of their bus, and over ranks what of them was transfer and what was waiting."""
    shared = make_shared_communication_cells(report.together.exchanges, _MOST_ROWS) if report.together else None
    own = make_communication_cells(rank, _MOST_ROWS)
    tables = [_make_shown_table(one) for one in (shared, own) if one is not None and one.count]
    if not tables:
        return []
    note = "Bus GB/s are counted as nccl-tests does; those of one rank include its waiting for the others."
    html = join_blocks([*tables, make_paragraph(note, "note")])
    return [Section(key="collectives", title="Exchanges", html=html)]


def _make_shown_table(one: ProfileTable) -> Html:
    rest = [make_paragraph(f"{line[0].upper()}{line[1:]}.", "note") for line in (one.note, one.left_out) if line]
    rows = [["" if cell == "-" else cell for cell in row] for row in one.rows]
    return join_blocks([make_table(one.header, rows, right=one.right, caption=one.title), *rest])


def make_comparison_page(before: TraceReport, after: TraceReport) -> Page:
    """The page of a traced run (`after`) alongside another (`before`), by the mean steps of their slowest ranks."""
    compared = compare_reports(before, after)
    old, new = compared.names
    sections = [_make_why_section(compared), _make_timelines_section(before, after)]
    sections.append(make_software_section([("Before", old), ("After", new)]))
    subtitle = f"{new} against {old}"
    return Page(title="Two traced runs", subtitle=subtitle, sections=sections, tiles=_make_comparison_tiles(compared))


def _make_comparison_tiles(compared: TraceComparison) -> list[Tile]:
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
            "" if c.share is None else f"{round(c.share, 2) or 0.0:.0%}",
            make_bar(abs(c.change) / largest, 3 if c.change > 0 else 2),
        )
        for c in [c for c in changes if max(c.before, c.after) >= _LEAST_SHOWN][:most]
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

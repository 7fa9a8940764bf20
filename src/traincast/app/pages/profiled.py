"""What people open a profiler's page for, of the slowest rank of a traced run: tables and the memory over time."""

from __future__ import annotations

from traincast.app.pages.charts import make_traced_memory_chart
from traincast.app.pages.elements import Html, fold_block, join_blocks, make_chart, make_paragraph, make_table
from traincast.app.pages.page import Section
from traincast.app.report.measured_profile import (
    ProfileTable,
    make_communication_cells,
    make_profile_tables,
    make_shared_communication_cells,
)
from traincast.traces.replay.results import RankReport, TraceReport

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
    return [Section(key="profile", title="Profile", html=html, charts={"memory": charts} if charts else {}, wide=True)]


def make_collectives_sections(report: TraceReport, rank: RankReport) -> list[Section]:
    """Collectives with the bandwidth of their bus, and over ranks what of them was transfer and what was waiting."""
    shared = make_shared_communication_cells(report.together.exchanges, _MOST_ROWS) if report.together else None
    own = make_communication_cells(rank, _MOST_ROWS)
    tables = [_make_shown_table(one) for one in (shared, own) if one is not None and one.count]
    if not tables:
        return []
    note = "Bus GB/s are counted as nccl-tests does; those of one rank include its waiting for the others."
    html = join_blocks([*tables, make_paragraph(note, "note")])
    return [Section(key="collectives", title="Exchanges", html=html, wide=True)]


def _make_shown_table(one: ProfileTable) -> Html:
    rest = [make_paragraph(f"{line[0].upper()}{line[1:]}.", "note") for line in (one.note, one.left_out) if line]
    return join_blocks([make_table(one.header, one.rows, right=one.right, caption=one.title), *rest])

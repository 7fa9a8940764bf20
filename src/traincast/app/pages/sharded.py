"""The page of a sharding plan: the step, its rivals, what every rank does and holds, where tables go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from traincast.app.pages.page import Page, Section, Tile, join_blocks, make_bar, make_facts, make_paragraph, make_table
from traincast.app.pages.parts import (
    format_number,
    make_bound_tile,
    make_memory_tile,
    make_records_table,
    make_step_tile,
    make_verdict_html,
    make_warnings_html,
)
from traincast.app.pages.prediction import make_detail_sections
from traincast.planner.sharding.result import ShardingResult
from traincast.simulator.collective_calls import number_ranks
from traincast.utils.display.text import format_milliseconds


def make_sharding_page(result: ShardingResult, price: float | None = None) -> Page:
    """The page of a search for plans; the step of the best one is shown in full."""
    title, subtitle, *_ = result.headline().split("\n")
    best = result.best.prediction
    why, timeline, *rest = make_detail_sections(best, price)
    sections = [
        make_result_section(result),
        why,
        timeline,
        make_ranks_section(result),
        make_tables_section(result),
        *(section for section in rest if section.key != "ranks"),
    ]
    others = [plan for plan in result.plans if plan.name != result.best.name]
    gain = f"{others[0].name} takes {others[0].seconds / result.best.seconds - 1:+.1%}" if others else ""
    tiles = [
        make_step_tile(best, "One step" if result.is_whole_step else "Embedding part of a step"),
        Tile("Best plan", result.best.name, gain),
        make_bound_tile(best),
        make_memory_tile(best),
    ]
    return Page(title=title, subtitle=subtitle, sections=sections, tiles=tiles)


def make_result_section(result: ShardingResult) -> Section:
    """The step of the best plan, and why others are slower."""
    best = result.best
    slowest = max(plan.seconds for plan in result.plans)
    rows = [
        (plan.name, format_milliseconds(plan.seconds), f"{plan.seconds / best.seconds - 1.0:+.1%}",
         f"{plan.prediction.needed_bytes / 1e9:.1f}", "yes" if plan.fits else "no", plan.explain_slower(best),
         make_bar(plan.seconds / slowest))
        for plan in result.plans
    ]  # fmt: skip
    known = [("Plans scored", f"{result.scored:,}"), ("Compared in full", str(len(result.plans)))]
    refused = [] if best.fits else [make_paragraph("No plan fits in memory", "verdict poor")]
    html = join_blocks(
        [
            *refused,
            make_verdict_html(best.prediction.trust),
            make_facts(known),
            make_table(
                ("plan", "ms", "slower by", "GB, fullest", "fits", "why", ""),
                rows,
                right=(1, 2, 3),
                caption="Plans that were compared",
            ),
            make_warnings_html([*result.notes, *best.prediction.warnings]),
        ]
    )
    return Section(key="answer", title="Plans", html=html, wide=True)


def make_ranks_section(result: ShardingResult) -> Section:
    """What every rank spends on what, and holds."""
    html = join_blocks([
        make_paragraph("Terms overlap; computing, exposed communication and idle time make up the step.", "note"),
        make_records_table(_fold_ranks(result.records()["ranks"]), "Ranks of the best plan"),
    ])  # fmt: skip
    return Section(key="ranks", title="Every rank", html=html, wide=True)


def _fold_ranks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ranks that do and hold the same in one row."""
    same: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        shown = [format_number(value) for name, value in row.items() if name != "rank"]
        same.setdefault(str(shown), []).append(row)
    return [{**group[0], "rank": number_ranks([row["rank"] for row in group])} for group in same.values()]


def make_tables_section(result: ShardingResult) -> Section:
    """Where the best plan has each table."""
    rows = result.records()["tables"]
    table = make_records_table(rows, "Tables of the best plan")
    return Section(key="tables", title="Where tables go", html=table)

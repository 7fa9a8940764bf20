"""The page of a sharding plan: the step, its rivals, what every rank does and holds, where tables go."""

from __future__ import annotations

from traincast.app.pages.elements import bar, facts, joined, paragraph, table
from traincast.app.pages.page import Page, Section
from traincast.app.pages.parts import number_html, records_table, warnings_html
from traincast.app.pages.prediction import detail_sections, verdict_of
from traincast.planner.sharding.result import ShardingResult
from traincast.utils.display.text import format_milliseconds


def sharding_page(result: ShardingResult, price: float | None = None) -> Page:
    """The page of a search for plans; the step of the best one is shown in full."""
    title, subtitle, *_ = result.headline().split("\n")
    best = result.best.prediction
    why, timeline, *rest = detail_sections(best, price)
    sections = [make_result_section(result), why, timeline, ranks_section(result), tables_section(result), *rest]
    return Page(title=title, subtitle=subtitle, sections=sections)


def make_result_section(result: ShardingResult) -> Section:
    """The step of the best plan, and why others are slower."""
    best = result.best
    slowest = max(plan.seconds for plan in result.plans)
    rows = [
        (plan.name, format_milliseconds(plan.seconds), f"{plan.seconds / best.seconds - 1.0:+.1%}",
         f"{plan.memory.device.max() / 1e9:.1f}", "yes" if plan.memory.fits else "no", plan.why_slower(best),
         bar(plan.seconds / slowest))
        for plan in result.plans
    ]  # fmt: skip
    known = [("Plans scored", f"{result.scored:,}"), ("Compared in full", str(len(result.plans)))]
    refused = [] if best.memory.fits else [paragraph("Rejected: no plan fits in memory", "verdict")]
    html = joined([
        number_html(best.seconds, best.prediction.interval), *refused, verdict_of(best.prediction), facts(known),
        table(("plan", "ms", "slower by", "GB, fullest", "fits", "why", ""), rows, right=(1, 2, 3),
              caption="Plans that were compared"),
        warnings_html([*result.notes, *best.prediction.warnings]),
    ])  # fmt: skip
    return Section(key="answer", title="How long", html=html)


def ranks_section(result: ShardingResult) -> Section:
    """What every rank spends on what, and holds."""
    html = joined([
        paragraph("Terms overlap; computing, exposed communication and idle time make up the step.", "note"),
        records_table(result.records()["ranks"], "Ranks of the best plan"),
    ])  # fmt: skip
    return Section(key="ranks", title="Every rank", html=html)


def tables_section(result: ShardingResult) -> Section:
    """Where the best plan has each table."""
    rows = result.records()["tables"]
    return Section(key="tables", title="Where tables go", html=records_table(rows, "Tables of the best plan"))

"""The page of a sharding plan: the step, its rivals, what every rank does and holds, where tables go."""

from __future__ import annotations

from traincast.app.pages.elements import bar, facts, joined, paragraph, table
from traincast.app.pages.page import Page, Section
from traincast.app.pages.parts import number_html, records_table, warnings_html
from traincast.app.pages.predicted import detail_sections, verdict_of
from traincast.planner.sharding.result import ShardingAnswer
from traincast.utils.display.text import milliseconds


def sharding_page(answer: ShardingAnswer, price: float | None = None) -> Page:
    """The page of a search for plans; the step of the best one is shown in full."""
    title, subtitle, *_ = answer.headline().split("\n")
    best = answer.best.prediction
    why, timeline, *rest = detail_sections(best, price)
    sections = [answer_section(answer), why, timeline, ranks_section(answer), tables_section(answer), *rest]
    return Page(title=title, subtitle=subtitle, sections=sections)


def answer_section(answer: ShardingAnswer) -> Section:
    """The step of the best plan, and why others are slower."""
    best = answer.best
    slowest = max(plan.seconds for plan in answer.plans)
    rows = [
        (plan.name, milliseconds(plan.seconds), f"{plan.seconds / best.seconds - 1.0:+.1%}",
         f"{plan.memory.device.max() / 1e9:.1f}", "yes" if plan.memory.fits else "no", plan.why_slower(best),
         bar(plan.seconds / slowest))
        for plan in answer.plans
    ]  # fmt: skip
    known = [("Plans scored", f"{answer.scored:,}"), ("Compared in full", str(len(answer.plans)))]
    refused = [] if best.memory.fits else [paragraph("Refused: no plan fits in memory", "verdict")]
    html = joined([
        number_html(best.seconds, best.prediction.interval), *refused, verdict_of(best.prediction), facts(known),
        table(("plan", "ms", "slower by", "GB, fullest", "fits", "why", ""), rows, right=(1, 2, 3),
              caption="Plans that were compared"),
        warnings_html([*answer.notes, *best.prediction.warnings]),
    ])  # fmt: skip
    return Section(key="answer", title="How long", html=html)


def ranks_section(answer: ShardingAnswer) -> Section:
    """What every rank spends on what, and holds."""
    html = joined([
        paragraph("Terms overlap; computing, exposed exchanges and idle time make up the step.", "note"),
        records_table(answer.records()["ranks"], "Ranks of the best plan"),
    ])  # fmt: skip
    return Section(key="ranks", title="Every rank", html=html)


def tables_section(answer: ShardingAnswer) -> Section:
    """Where the best plan has each table."""
    rows = answer.records()["tables"]
    return Section(key="tables", title="Where tables go", html=records_table(rows, "Tables of the best plan"))

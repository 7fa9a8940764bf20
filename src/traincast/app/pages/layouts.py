"""The page of a search for layouts of a Transformer: the best, and how far the others are."""

from __future__ import annotations

from traincast.app.pages.elements import fold_block, join_blocks, make_bar, make_list, make_table
from traincast.app.pages.page import Page, Section
from traincast.app.pages.prediction import make_prediction_page
from traincast.planner.parallelism.plan import Plan


def make_plan_page(plan: Plan, price: float | None = None) -> Page:
    """The page of a search for layouts: the best, how far the others are, and the best one in full."""
    best = make_prediction_page(plan.best[0], plan.price if price is None else price)
    subtitle = f"{plan.scored} layouts scored, {plan.too_large} faster ones too large; the best is shown in full"
    first, *rest = best.sections
    return Page(title=f"{plan.model.name} on {plan.base.gpus} x {plan.platform.device.name}: the best layouts",
                subtitle=subtitle, sections=[make_search_section(plan), first, *rest], tiles=best.tiles)  # fmt: skip


def make_search_section(plan: Plan) -> Section:
    """The best layouts, one row each, and what makes each slower than the first."""
    fastest = plan.best[0].iteration
    rows = []
    for number in range(len(plan.best)):
        row = plan.row(number)
        low, high = row["interval_ms"]
        dollars, days = row["dollars_per_billion_tokens"], row["days"]
        rows.append((
            str(row["layout"]), f"{row['iteration_ms']:,.0f}", f"{low:,.0f} to {high:,.0f}",
            f"{row['tokens_per_second_per_gpu']:,.0f}", f"{row['mfu']:.1%}", f"{row['memory_gb']:.1f}",
            "" if dollars is None else f"{dollars:,.0f}", "" if days is None else f"{days:,.1f}",
            str(row["slower_by"]), make_bar(fastest / (1e-3 * row["iteration_ms"])),
        ))  # fmt: skip
    header = ("layout", "ms", "90 % interval", "tokens/s per GPU", "MFU", "GB", "$ a billion tokens", "days",
              "slower by", "speed")  # fmt: skip
    commands = make_list(plan.commands)
    html = join_blocks([make_table(header, rows, right=range(1, 8), caption="Layouts, the fastest first"),
                        fold_block("the command that predicts each", commands)])  # fmt: skip
    return Section(key="search", title="The best layouts", html=html, wide=True)

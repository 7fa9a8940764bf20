"""The pages of Transformers laid over GPUs: one layout, and the best of a search."""

from __future__ import annotations

from traincast.app.pages.elements import Html, bar, facts, joined, paragraph, table
from traincast.app.pages.page import Page, Section
from traincast.app.pages.parts import NO_PRICE, number_html, step_stack, verdict_html, warnings_html
from traincast.app.pages.provenance import provenance_section
from traincast.planner.parallelism.plan import Plan
from traincast.simulator.parallelism.result import TrainingPrediction
from traincast.utils.display.text import milliseconds

_FAMILIES = ("gemm", "attention", "norm", "elementwise", "collective")  # what a described Transformer is made of


def layout_page(p: TrainingPrediction, price: float | None = None) -> Page:
    """The page of one layout; `price` is dollars of a GPU and hour."""
    title, subtitle, *_ = p.headline().split("\n")
    sections = [answer_section(p), why_section(p), memory_section(p), money_section(p, price)]
    sections.append(provenance_section(_FAMILIES, p.platform, p.host_profile))
    return Page(title=title, subtitle=subtitle.rpartition(": ")[0], sections=sections)


def answer_section(p: TrainingPrediction) -> Section:
    """The number, its interval, and what it makes of the device."""
    kernels = p.parts.kernels or 1.0
    known = [
        ("Tokens a second and GPU", f"{p.tokens_per_second:,.0f}"),
        ("MFU", f"{p.mfu:.1%} of {p.peak_flops / 1e12:,.0f} TFLOPS"),
        ("Memory of the fullest rank", f"{p.needed / 1e9:.1f} of {p.platform.device.memory_bytes / 1e9:.0f} GB"),
        ("Layout", p.layout.described()),
    ]
    refused = [] if p.fits else [paragraph("Refused: it does not fit in memory", "verdict")]
    html = joined([
        number_html(p.iteration, p.interval), *refused, verdict_html(min(p.parts.unknown / kernels, 1.0)),
        facts(known), warnings_html(p.warnings),
    ])  # fmt: skip
    return Section(key="answer", title="How long", html=html)


def why_section(p: TrainingPrediction) -> Section:
    """The step by what it waits for; the parts add up to it."""
    parts = p.split()
    rows = [
        (name, milliseconds(s), f"{s / p.iteration:.1%}", bar(s / p.iteration, n)) for n, (name, s) in enumerate(parts)
    ]
    html = joined([
        step_stack(parts, p.iteration, "One step of the slowest stage"),
        table(("part", "ms", "of the step", ""), rows, right=(1, 2), caption="What the step is spent on"),
        paragraph("Ranks of one role are one; there is no timeline of single launches.", "note"),
    ])  # fmt: skip
    return Section(key="why", title="Why", html=html)


def memory_section(p: TrainingPrediction) -> Section:
    """What the fullest rank holds."""
    capacity = p.platform.device.memory_bytes
    held = sorted(p.memory.items(), key=lambda item: -item[1])
    rows = [(kind.replace("_", " "), f"{size / 1e9:.2f}", bar(size / capacity)) for kind, size in held]
    html = table(("kind", "GB", "of the device"), rows, right=(1,), caption="Memory of the fullest rank")
    return Section(key="memory", title="Memory", html=html)


def money_section(p: TrainingPrediction, price: float | None) -> Section:
    """Tokens and, where a price is known, dollars."""
    tokens = p.layout.global_batch * p.layout.seq_len
    known = [
        ("Tokens a step", f"{tokens:,}"),
        ("GPU hours a billion tokens", f"{1e9 / p.tokens_per_second / 3600:,.0f}"),
    ]
    if price is not None:
        known.append(("A billion tokens", f"${price * 1e9 / p.tokens_per_second / 3600:,.4g}"))
    note = Html("") if price is not None else paragraph(NO_PRICE, "note")
    return Section(key="money", title="What it costs", html=joined([facts(known), note]))


def plan_page(plan: Plan, price: float | None = None) -> Page:
    """The page of a search for layouts: the best, how far the others are, and the best one in full."""
    best = layout_page(plan.best[0], plan.price if price is None else price)
    subtitle = f"{plan.scored} layouts scored, {plan.too_large} too large for memory; the best is shown in full"
    first, *rest = best.sections
    return Page(title=f"{plan.model.name} on {plan.base.gpus} x {plan.platform.device.name}: the best layouts",
                subtitle=subtitle, sections=[first, search_section(plan), *rest])  # fmt: skip


def search_section(plan: Plan) -> Section:
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
            str(row["slower_by"]), bar(fastest / (1e-3 * row["iteration_ms"])),
        ))  # fmt: skip
    header = ("layout", "ms", "90 % interval", "tokens/s a GPU", "MFU", "GB", "$ a billion tokens", "days",
              "slower by", "speed")  # fmt: skip
    html = table(header, rows, right=range(1, 8), caption="The best layouts")
    return Section(key="search", title="What else was tried", html=html)

"""The page of a scaling curve: the curve with its interval, its points, and the last one in full."""

from __future__ import annotations

from traincast.app.pages.charts import make_scaling_chart
from traincast.app.pages.elements import join_blocks, make_bar, make_chart, make_table
from traincast.app.pages.page import Page, Section, Tile
from traincast.app.pages.parts import (
    make_cost_tile,
    make_memory_tile,
    make_step_tile,
    make_verdict_html,
    make_warnings_html,
)
from traincast.app.pages.prediction import make_detail_sections
from traincast.simulator.prediction.scaling import ScalingCurve
from traincast.utils.display.text import format_milliseconds


def make_scaling_page(curve: ScalingCurve, price: float | None = None) -> Page:
    """The page of a scaling curve; `price` is dollars of a GPU and hour."""
    title, _, subtitle = curve.title().partition(": ")
    last = curve.points[-1]
    sections = [make_curve_section(curve, price), *make_detail_sections(last.answer, price)]
    detail = f"{subtitle}; from 'Why' on: {last.gpus} GPUs"
    efficiency = Tile("Efficiency", f"{last.efficiency:.0%}",
                      f"of the first point's throughput per GPU is left on {last.gpus} GPUs")  # fmt: skip
    step = make_step_tile(last.answer, f"One step, {last.gpus} GPUs")
    tiles = [step, efficiency, make_memory_tile(last.answer), make_cost_tile(last.answer, price)]
    return Page(title=title, subtitle=detail, sections=sections, tiles=tiles)


def make_curve_section(curve: ScalingCurve, price: float | None) -> Section:
    """Milliseconds over GPUs with the interval, and every point as a row."""
    rows = []
    for point in curve.points:
        result = point.answer
        low, high = (format_milliseconds(limit) for limit in result.interval)
        per_million = 1e6 * (price or 0.0) * point.gpus / 3600.0 / max(point.throughput, 1e-30)
        rows.append(
            (
                str(point.gpus),
                f"{point.global_batch:,}",
                format_milliseconds(result.iteration),
                f"{low} to {high}",
                f"{point.throughput:,.0f}",
                format_milliseconds(result.exposed_comm),
                f"{result.memory.peak_bytes / 1e9:.1f}",
                "" if price is None else f"{per_million:,.4g}",
                f"{point.efficiency:.1%}",
                make_bar(point.efficiency),
            )
        )
    header = ("GPUs", "batch", "ms per step", "90 % interval", "samples/s", "exposed, ms", "GB per GPU",
              "$ a million samples", "efficiency", "")  # fmt: skip
    last = curve.points[-1]
    html = join_blocks(
        [
            make_verdict_html(last.answer.trust),
            make_chart(
                "scaling", "Milliseconds a step over GPUs, with the 90 % interval", "The band is the 90 % interval."
            ),
            make_table(header, rows, right=range(9), caption="Points of the curve"),
            make_warnings_html(curve.warnings),
        ]
    )
    return Section(key="answer", title="How it scales", html=html, charts={"scaling": make_scaling_chart(curve)},
                   wide=True)  # fmt: skip

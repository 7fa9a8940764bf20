"""Pages of choices: layouts, platforms side by side, scaling curves, whether a step fits."""

from __future__ import annotations

from traincast.app.pages.charts import make_scaling_chart
from traincast.app.pages.page import (
    Html,
    Page,
    Section,
    Tile,
    fold_block,
    join_blocks,
    make_bar,
    make_chart,
    make_list,
    make_paragraph,
    make_table,
)
from traincast.app.pages.parts import (
    fold_records,
    format_number,
    make_cost_tile,
    make_memory_tile,
    make_records_table,
    make_software_section,
    make_step_tile,
    make_verdict_html,
    make_warnings_html,
)
from traincast.app.pages.prediction import make_detail_sections, make_memory_section, make_prediction_page
from traincast.planner.fitting import Fit
from traincast.planner.parallelism.plan import Plan
from traincast.planner.what_if.money import PlatformComparison, PlatformStep
from traincast.simulator.prediction.result import state_memory
from traincast.simulator.scenario.scaling import ScalingCurve
from traincast.utils.display.text import (
    format_count,
    format_dollars,
    format_duration,
    format_interval,
    format_milliseconds,
)


def make_plan_page(plan: Plan, price: float | None = None) -> Page:
    """The page of a search for layouts: the best, how far the others are, and the best one in full."""
    best = make_prediction_page(plan.best[0], plan.price if price is None else price)
    subtitle = f"{plan.scored} layouts scored, {plan.too_large} faster ones too large; the best is shown in full"
    first, *rest = best.sections
    return Page(title=f"{plan.model.name} on {plan.base.gpus} x {plan.platform.device.name}: the best layouts",
                subtitle=subtitle, sections=[make_search_section(plan), first, *rest], tiles=best.tiles)  # fmt: skip


def make_search_section(plan: Plan) -> Section:
    """The best layouts, one row each, and what makes each slower than the first."""
    fastest = min(result.iteration for result in plan.best)
    rows = []
    for number in range(len(plan.best)):
        row = plan.row(number)
        low, high = row["interval_ms"]
        dollars, days = row["dollars_per_billion_tokens"], row["days"]
        rows.append((
            str(row["layout"]), f"{row['iteration_ms']:,.0f}", f"{low:,.0f} to {high:,.0f}",
            f"{row['tokens_per_second_per_gpu']:,.0f}", f"{row['mfu']:.1%}",
            f"{row['memory_gb']:.1f}" + ("" if plan.best[number].fits else ", too large"),
            "" if dollars is None else f"{dollars:,.0f}", "" if days is None else f"{days:,.1f}",
            str(row["slower_by"]), make_bar(fastest / (1e-3 * row["iteration_ms"])),
        ))  # fmt: skip
    header = ("layout", "ms", "90 % interval", "tokens/s per GPU", "MFU", "GB", "$ a billion tokens", "days",
              "slower by", "speed")  # fmt: skip
    commands = make_list(plan.commands)
    html = join_blocks([make_table(header, rows, right=range(1, 8), caption="Layouts, the fastest first"),
                        fold_block("the command that predicts each", commands)])  # fmt: skip
    return Section(key="search", title="The best layouts", html=html, wide=True)


def make_platforms_page(result: PlatformComparison, _: float | None = None) -> Page:
    """The page; prices are those the comparison was made with."""
    longest = max(_list_limits(step)[1] for step in result.steps)
    rows: list[tuple[str | Html, ...]] = [
        (
            step.platform,
            format_duration(step.prediction.iteration),
            format_interval(step.prediction.interval),
            make_bar(
                step.seconds_per_sample / longest,
                0 if step.prediction.fits else 7,
                _list_limits(step, longest),
            ),
            f"{format_count(step.prediction.throughput.samples)}/s",
            f"{step.prediction.needed_bytes / 1e9:.3g} GB" + ("" if step.prediction.fits else ", does not fit"),
            "" if step.dollars is None else format_dollars(step.dollars),
            step.prediction.trust.word,
        )
        for step in result.steps
    ]
    header = ("platform", "per step", "90 % interval", "time of a sample", "samples", "memory",
              f"$ per {result.unit}", "trust")  # fmt: skip
    failed = [f"{name}: {why}" for name, why in result.failed.items()]
    blocks = [
        make_table(header, rows, right=(1, 4, 5, 6), caption="Platforms, fastest first"),
        make_paragraph("Bars are the time of one sample; the thin line is its 90 % interval, grey does not fit. "
                       + (f"Prices: {result.priced}." if result.priced else ""), "note"),
        make_list(failed, "warnings"), fold_records(result.records()),
    ]  # fmt: skip
    table = Section(key="answer", title="Side by side", html=join_blocks(blocks), wide=True)
    sections = [table, make_software_section([])]
    subtitle = f"One step on {len(result.steps)} platforms"
    return Page(title=f"{result.name}: which GPU?", subtitle=subtitle, sections=sections, tiles=_make_tiles(result))


def _list_limits(step: PlatformStep, whole: float = 1.0) -> tuple[float, float]:
    """The interval of the time of one sample, in seconds, as a share of `whole`."""
    low, high = (limit / step.cost.samples / whole for limit in step.prediction.interval)
    return low, high


def _make_tiles(result: PlatformComparison) -> list[Tile]:
    first, least = result.fastest, result.cheapest
    fitting = [step for step in result.steps if step.prediction.fits]
    tight = ", ".join(step.platform for step in result.steps if not step.prediction.fits)
    slowest = result.steps[-1]
    times = slowest.seconds_per_sample / first.seconds_per_sample
    tiles = [
        Tile("Fastest", first.platform, f"{format_duration(first.prediction.iteration)} per step, 90 % interval "
             f"{format_interval(first.prediction.interval)}", "good"),
        Tile("Fits on", f"{len(fitting)} of {len(result.steps)}", f"not on {tight}" if tight else "all of them"),
        Tile("Spread", f"{times:.1f} times", f"from {first.platform} to {slowest.platform}, per sample"),
    ]  # fmt: skip
    if least is not None and least.dollars is not None:
        tiles.insert(1, Tile("Cheapest", least.platform, f"{format_dollars(least.dollars)} per {result.unit}", "good"))
    return tiles


def make_scaling_page(curve: ScalingCurve, price: float | None = None) -> Page:
    """The page of a scaling curve; `price` is dollars of a GPU and hour."""
    title, _, subtitle = curve.title().partition(": ")
    last = curve.points[-1]
    sections = [make_curve_section(curve, price), *make_detail_sections(last.answer, price)]
    detail = f"{subtitle}; below the curve: {last.gpus} GPUs"
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
                f"{point.throughput:,.0f}" if point.throughput >= 100 else f"{point.throughput:.3g}",
                format_milliseconds(result.exposed_comm),
                f"{result.needed_bytes / 1e9:.1f}" + ("" if result.fits else ", too large"),
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


def make_fit_page(fit: Fit, _: float | None = None) -> Page:
    """The page; it has no dollars."""
    p, memory = fit.prediction, fit.memory
    needed = p.needed_bytes
    fullest = max(memory.by_kind.items(), key=lambda pair: pair[1], default=("nothing", 0.0))
    help = fit.remedies[0].text if fit.remedies else "nothing needed" if fit.fits else "nothing tried"
    free = (memory.limit_bytes - needed) / 1e9
    sure = p.fit_probability if fit.fits else 1 - p.fit_probability
    tiles = [
        make_memory_tile(p)._replace(note="" if "%" in state_memory(p) else f"{sure:.0%} sure"),
        Tile("Needed", f"{needed / 1e9:.1f} GB", f"of {memory.limit_bytes / 1e9:.0f} GB, "
             + (f"{free:.1f} GB free" if free >= 0 else f"{-free:.1f} GB too much")),
        Tile("Most of it", fullest[0].replace("_", " "), f"{fullest[1] / 1e9:.1f} GB"),
        _make_largest_tile(fit) if fit.largest else Tile("Would make it fit", help),
    ]  # fmt: skip
    answer = Section(key="answer", title="What would make it fit", html=_list_remedies(fit))
    rows = [{k: str(v).replace("_", " ") if isinstance(v, str) else v for k, v in one.items()}
            for one in fit.list_culprits()]  # fmt: skip
    largest = make_records_table(rows, "The largest tensors at the peak")
    sections = [answer, Section(key="largest", title="Largest tensors", html=largest), make_memory_section(p)]
    tiles = tiles if fit.remedies or fit.largest else [*tiles[:3], make_step_tile(p)]
    subtitle = p.headline().split("\n")[1].partition(":")[0]
    return Page(title=p.headline().split("\n")[0], subtitle=subtitle, tiles=tiles,
                sections=[*sections, make_software_section([])])  # fmt: skip


def _make_largest_tile(fit: Fit) -> Tile:
    assert fit.largest is not None
    return Tile(f"Largest {fit.largest.axis}", fit.largest.text, f"fits with {fit.largest.probability:.0%}")


def _list_remedies(fit: Fit) -> Html:
    remarks = make_warnings_html(fit.prediction.warnings)
    if not fit.remedies:
        said = f"As it is, it {state_memory(fit.prediction)}." if fit.fits else "Nothing that was tried makes it fit."
        return join_blocks([make_paragraph(said), remarks])
    limit = fit.memory.limit_bytes
    rows = [
        (one.text, format_number(one.prediction.needed_bytes / 1e9),
         make_bar(one.prediction.needed_bytes / limit), f"{one.prediction.fit_probability:.0%}",
         format_duration(one.prediction.iteration))
        for one in fit.remedies
    ]  # fmt: skip
    header = ("change", "needs, GB", "of the GPU", "sure", "one step")
    table = make_table(header, rows, right=(1, 3, 4), caption="Changes under which it fits, the cheapest first")
    return join_blocks([table, remarks])

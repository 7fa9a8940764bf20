"""The page of a comparison of platforms: bars with their intervals, then every figure."""

from __future__ import annotations

from traincast.app.pages.elements import Html, join_blocks, make_bar, make_list, make_paragraph, make_table
from traincast.app.pages.page import Page, Section, Tile
from traincast.app.pages.parts import fold_records
from traincast.app.pages.provenance import make_software_section
from traincast.planner.what_if.platforms import PlatformComparison, PlatformStep
from traincast.utils.display.text import format_count, format_dollars, format_duration, format_interval


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

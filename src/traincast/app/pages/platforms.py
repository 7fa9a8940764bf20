"""The page of a comparison of platforms: bars with their intervals, then every figure."""

from __future__ import annotations

from traincast.app.pages.elements import Html, join_blocks, make_bar, make_facts, make_list, make_table
from traincast.app.pages.page import Page, Section
from traincast.app.pages.parts import fold_records
from traincast.app.pages.provenance import make_software_section
from traincast.planner.what_if.platforms import PlatformComparison
from traincast.utils.display.text import format_count, format_dollars, format_duration, format_interval


def make_platforms_page(result: PlatformComparison, _: float | None = None) -> Page:
    """The page; prices are those the comparison was made with."""
    title, *verdict = result.headline().split("\n")
    longest = max(step.seconds_per_sample for step in result.steps)
    rows: list[tuple[str | Html, ...]] = [
        (
            step.platform,
            format_duration(step.prediction.iteration),
            format_interval(step.prediction.interval),
            make_bar(step.seconds_per_sample / longest),
            f"{format_count(step.prediction.throughput.samples)}/s",
            f"{step.prediction.needed_bytes / 1e9:.3g} GB" + ("" if step.prediction.fits else ", does not fit"),
            "" if step.dollars is None else format_dollars(step.dollars),
            step.prediction.trust.word,
        )
        for step in result.steps
    ]
    header = ("platform", "per step", "90 % interval", "time of a sample", "samples", "memory",
              f"$ per {result.unit}", "trust")  # fmt: skip
    known = [("Fastest", result.fastest.platform)]
    known += [("Cheapest", result.cheapest.platform)] if result.cheapest else []
    known += [("Prices", result.priced)] if result.priced else []
    failed = [f"{name}: {why}" for name, why in result.failed.items()]
    blocks = [
        make_facts(known), make_table(header, rows, right=(1, 4, 5, 6), caption="Platforms, fastest first"),
        make_list(failed, "warnings"), fold_records(result.records()),
    ]  # fmt: skip
    sections = [Section(key="answer", title="Side by side", html=join_blocks(blocks)), make_software_section([])]
    return Page(title=title, subtitle="; ".join(verdict), sections=sections)

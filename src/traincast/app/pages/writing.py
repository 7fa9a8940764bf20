"""Any answer as a page, and the file that it is written to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from traincast.app.pages.choices import make_fit_page, make_plan_page, make_platforms_page, make_scaling_page
from traincast.app.pages.decisions import (
    make_advice_page,
    make_sweep_page,
    make_what_if_page,
    make_what_ifs_html,
    try_usual_edits,
)
from traincast.app.pages.measured import make_comparison_page, make_trace_page
from traincast.app.pages.page import MOST_BYTES, Page, Section, join_blocks, render_page
from traincast.app.pages.parts import fold_records, make_software_section
from traincast.app.pages.prediction import make_prediction_page
from traincast.app.pages.sharded import make_sharding_page
from traincast.planner.fitting import Fit
from traincast.planner.parallelism.plan import Plan
from traincast.planner.sharding.result import ShardingResult
from traincast.planner.what_if.advice import Advice
from traincast.planner.what_if.money import PlatformComparison
from traincast.planner.what_if.result import WhatIf
from traincast.planner.what_if.sweeps.result import SweepResult
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.scaling import ScalingCurve
from traincast.traces.replay.results import TraceReport
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path
from traincast.utils.files.writing import write_bytes
from traincast.utils.results import Result


@dataclass(frozen=True, kw_only=True, repr=False)
class WrittenPage(Result):
    """A page that was written: its `file`, its size in `bytes`, its title and the keys of its sections."""

    file: Path
    bytes: int
    title: str
    sections: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"file": str(self.file), "bytes": self.bytes, "title": self.title, "sections": list(self.sections)}

    def headline(self) -> str:
        """The file, its size and what is in it."""
        parts = ", ".join(self.sections)
        return f"{self.title}\nwrote {format_path(self.file)} ({self.bytes / 1e3:,.0f} kB): {parts}"


@runtime_checkable
class DrawsPage(Protocol):
    """A result that draws its own page; `price` is dollars of a GPU and hour."""

    def to_page(self, price: float | None) -> Page:
        """The page."""
        ...


_PAGES: dict[type[Result], Callable[[Any, float | None], Page]] = {
    Prediction: make_prediction_page,
    TraceReport: make_trace_page,
    ScalingCurve: make_scaling_page,
    Plan: make_plan_page,
    ShardingResult: make_sharding_page,
    WhatIf: make_what_if_page,
    Advice: make_advice_page,
    SweepResult: make_sweep_page,
    PlatformComparison: make_platforms_page,
    Fit: make_fit_page,
}


def make_page(result: Result, price: float | None = None, against: TraceReport | None = None) -> Page:
    """The page of any answer; `price` is dollars of a GPU and hour, `against` the traced run before. Answers of other
    distributions draw theirs by `to_page(price)`; those without a page of their own get tables."""
    if against is not None:
        if not isinstance(result, TraceReport):
            raise TraincastError("`against` compares traced runs; give a trace")
        return make_comparison_page(against, result)
    if price is not None and not 0 <= price < 1e6:
        raise TraincastError(f"`price` {price:g}: give dollars of one GPU for an hour, 0 or more")
    make = _PAGES.get(type(result))
    if make is not None:
        return make(result, price)
    if isinstance(result, DrawsPage):
        return result.to_page(price)
    return _make_plain_page(result)


def add_what_ifs(page: Page, result: Result, price: float | None) -> Page:
    """The page of a prediction with a few what-ifs below what it costs; other pages as they are."""
    if not isinstance(result, Prediction) or result.platform.device.is_cpu:  # edits are of GPUs
        return page
    added = make_what_ifs_html(try_usual_edits(result, price))
    title = "What it costs, what if"
    sections = [
        replace(section, title=title, html=join_blocks([section.html, added])) if section.key == "money" else section
        for section in page.sections
    ]
    return replace(page, sections=sections)


def _make_plain_page(result: Result) -> Page:
    title, _, rest = result.headline().partition("\n")
    html = fold_records(result.records())
    return Page(title=title, subtitle=rest, sections=[
        Section(key="answer", title=type(result).__name__, html=html), make_software_section([])])  # fmt: skip


def write_page(page: Page, out: Path) -> WrittenPage:
    """Writes a page, whole or not at all."""
    data = render_page(page).encode(errors="replace")  # half characters of a file that a page was made from
    if len(data) > MOST_BYTES:
        raise TraincastError(
            f"the report would be {len(data) / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}; give fewer GPUs or a "
            "shorter trace"
        )
    write_bytes(out, data)
    return WrittenPage(file=out, bytes=len(data), title=page.title, sections=tuple(s.key for s in page.sections))

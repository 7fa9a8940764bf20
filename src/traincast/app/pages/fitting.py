"""The page of whether a step fits in memory: what fills it, over the step and by whom, and what would make it fit."""

from __future__ import annotations

from traincast.app.pages.elements import Html, join_blocks, make_bar, make_paragraph, make_table
from traincast.app.pages.page import Page, Section, Tile
from traincast.app.pages.parts import format_number, make_records_table, make_step_tile, make_warnings_html
from traincast.app.pages.prediction import make_memory_section
from traincast.app.pages.provenance import make_software_section
from traincast.planner.fitting.fit import Fit
from traincast.utils.display.text import format_duration


def make_fit_page(fit: Fit, _: float | None = None) -> Page:
    """The page; it has no dollars."""
    p, memory = fit.prediction, fit.memory
    sure = memory.fit_probability if fit.fits else 1 - memory.fit_probability
    fullest = max(memory.by_kind.items(), key=lambda pair: pair[1], default=("nothing", 0.0))
    help = fit.remedies[0].text if fit.remedies else "nothing needed" if fit.fits else "nothing tried"
    free = (memory.limit_bytes - memory.used_bytes) / 1e9
    tiles = [
        Tile("Memory", "Fits" if fit.fits else "Does not fit", f"{sure:.0%} sure", "good" if fit.fits else "poor"),
        Tile("Used", f"{memory.used_bytes / 1e9:.1f} GB", f"of {memory.limit_bytes / 1e9:.0f} GB, "
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
        said = "It fits as it is." if fit.fits else "Nothing that was tried makes it fit."
        return join_blocks([make_paragraph(said), remarks])
    limit = fit.memory.limit_bytes
    rows = [
        (one.text, format_number(one.prediction.memory.used_bytes / 1e9),
         make_bar(one.prediction.memory.used_bytes / limit), f"{one.prediction.memory.fit_probability:.0%}",
         format_duration(one.prediction.iteration))
        for one in fit.remedies
    ]  # fmt: skip
    header = ("change", "used, GB", "of the GPU", "sure", "one step")
    table = make_table(header, rows, right=(1, 3, 4), caption="Changes under which it fits, the cheapest first")
    return join_blocks([table, remarks])

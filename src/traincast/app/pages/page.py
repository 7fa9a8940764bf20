"""A page: pieces of HTML (everything is escaped) and sections in order, in one file that needs nothing else and lets
nothing in."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any, NamedTuple

from traincast.utils.version import __version__

_LONG = 24  # letters of a cell
_LONG_NAME = re.compile(r"(\S{24,})")
_BREAKS = re.compile(r"(?<=[:_#(<,])(?=\w)|(?<=[a-z]\.)(?=[A-Za-z])|(?<=[a-z])(?=[A-Z])")
SLOTS = 12
"""This many colours, each with a texture of its own, tell parts apart."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape_html(value: str) -> Html:
    """The value as HTML: escaped, unless it is HTML already."""
    return value if isinstance(value, Html) else Html(escape(value))


def join_blocks(blocks: Iterable[str]) -> Html:
    """Pieces one after the other."""
    return Html("".join(escape_html(block) for block in blocks))


def make_paragraph(text: str, kind: str = "") -> Html:
    """A paragraph; `kind` is its class."""
    return Html(f"<p{_make_class(kind)}>{escape_html(text)}</p>")


def make_heading(text: str) -> Html:
    """A heading inside of a section."""
    return Html(f"<h3>{escape_html(text)}</h3>")


def make_list(lines: Iterable[str], kind: str = "") -> Html:
    """A list, or nothing where there are no lines."""
    entries = "".join(f"<li>{escape_html(line)}</li>" for line in lines)
    return Html(f"<ul{_make_class(kind)}>{entries}</ul>" if entries else "")


def make_facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Labels and their values."""
    entries = "".join(
        f"<div><dt>{escape_html(label)}</dt><dd>{escape_html(value)}</dd></div>" for label, value in pairs
    )
    return Html(f"<dl>{entries}</dl>")


def make_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = (), caption: str
) -> Html:
    """A table in a box that scrolls sideways where it is wide; columns in `right` are right-aligned, and those without
    a word in any row are left out."""
    numbers, rows = set(right), list(rows)
    kept = [at for at in range(len(header)) if not rows or any(row[at] for row in rows)]
    kinds = dict.fromkeys(numbers, ' class="n"')
    for at in kept:  # a phone leaves long texts some room
        if at not in numbers and any(len(row[at]) > _LONG and not isinstance(row[at], Html) for row in rows):
            kinds[at] = ' class="t"'

    def line(cells: Sequence[str], tag: str) -> str:
        tags = {at: tag if cells[at] else "td" for at in kept}  # a heading without a word is none
        scopes = {at: ' scope="col"' if tags[at] == "th" else "" for at in kept}
        written = (f"<{tags[at]}{kinds.get(at, '')}{scopes[at]}>{_break_words(cells[at])}</{tags[at]}>" for at in kept)
        return f"<tr>{''.join(written)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return Html(
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape_html(caption)}"><table>'
        f"<caption>{escape_html(caption)}</caption><thead>{line(header, 'th')}</thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def _break_words(text: str) -> Html:
    """Text as HTML that may be broken within its long names, after their punctuation."""
    if isinstance(text, Html):
        return text
    parts = _LONG_NAME.split(text)  # every other one is a long name
    parts[1::2] = ["<wbr>".join(map(escape, _BREAKS.split(name))) for name in parts[1::2]]
    parts[::2] = map(escape, parts[::2])
    return Html("".join(parts))


def fold_block(title: str, content: str) -> Html:
    """HTML under a title that opens and closes; it begins closed."""
    return Html(f"<details><summary>{escape_html(title)}</summary>{escape_html(content)}</details>")


def make_bar(share: float, slot: int = 0, interval: tuple[float, float] | None = None) -> Html:
    """A bar as long as a share (0 to 1) of its cell, with its interval (shares too) as a thin line; its figure stands
    alongside it, so it says nothing to a reader."""
    width, low, high = (min(max(100.0 * part, 0.0), 100.0) for part in (share, *(interval or (0.0, 0.0))))
    line = f'<path class="whisker" d="M{low:.2f} 5H{high:.2f}M{low:.2f} 2V8M{high:.2f} 2V8"/>' if interval else ""
    return Html(
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="s{slot % SLOTS}" width="{width:.2f}" height="10"/>{line}</svg>'
    )


def make_stack(parts: Sequence[tuple[str, float, str]], label: str, length: float = 1.0) -> Html:
    """Parts of a whole side by side, each with its texture: (name, share, figure); the legend below names them all. The
    bar is `length` of the full width."""
    shown = [(number, *part) for number, part in enumerate(parts) if part[1] > 0]
    whole = sum(share for _, _, share, _ in shown) or 1.0
    at, blocks = 0.0, []
    for number, _, share, _ in shown:
        width = 1000.0 * length * share / whole
        slot = number % SLOTS
        blocks.append(f'<rect class="s{slot}" x="{at:.1f}" width="{width:.1f}" height="44"/>')
        blocks.append(f'<rect fill="url(#t{slot})" x="{at:.1f}" width="{width:.1f}" height="44"/>')
        at += width
    legend = "".join(
        f"<li>{_make_swatch(number)}<b>{escape_html(name)}</b> {escape_html(figure)}</li>"
        for number, name, _, figure in shown
    )
    words = ", ".join(f"{name} {figure}" for _, name, _, figure in shown)
    return Html(
        f'<figure class="stack"><svg viewBox="0 0 1000 44" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape_html(f"{label}: {words}")}">{"".join(blocks)}</svg><ul class="legend">'
        f"{legend}</ul></figure>"
    )


def _make_swatch(number: int) -> str:
    slot = number % SLOTS
    box = 'width="16" height="16"'
    return (
        f'<svg class="swatch" viewBox="0 0 16 16" aria-hidden="true"><rect class="s{slot}" {box}/>'
        f'<rect fill="url(#t{slot})" {box}/></svg>'
    )


def make_chart(key: str, label: str, note: str = "") -> Html:
    """The place of a chart whose data the page has under `key`; `label` is what a screen reader says."""
    below = f"<figcaption>{escape_html(note)}</figcaption>" if note else ""
    return Html(
        f'<figure class="chart" data-chart="{escape_html(key)}"><div class="plot" role="img" '
        f'aria-label="{escape_html(label)}"></div>'
        f"{below}</figure>"
    )


def _make_class(kind: str) -> str:
    return f' class="{escape_html(kind)}"' if kind else ""


STYLES = ("uplot.min.css", "report.css")
SCRIPTS = ("uplot.min.js", "timeline.js", "drawing.js", "charts.js", "report.js")
"""In the order in which a page has them."""
MOST_BYTES = 5_000_000
"""A page is mailed and put into tickets; larger ones are not."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page. `charts` are what its charts and timelines show, by the keys that its HTML names; a `wide` one
    takes both columns of a wide screen."""

    key: str
    title: str
    html: Html
    charts: Mapping[str, Any] = field(default_factory=dict)
    wide: bool = False


class Tile(NamedTuple):
    """One of the figures at the top: what it is, its value, a line below, and "good", "poor" or nothing."""

    label: str
    value: str
    note: str = ""
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What is to be shown: a title, a line below it, about four tiles, and sections in reading order."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    tiles: Sequence[Tile] = ()

    @property
    def charts(self) -> dict[str, Any]:
        """What all charts show, by their keys."""
        return {key: chart for section in self.sections for key, chart in section.charts.items()}


def render_page(page: Page) -> str:
    """The page as one file: styles, scripts and data inside, and a policy that rejects everything from elsewhere."""
    styles, scripts = [read_asset(name) for name in STYLES], [read_asset(name) for name in SCRIPTS]
    policy = (
        f"default-src 'none'; style-src {_hash_scripts(styles)}; script-src {_hash_scripts(scripts)}; img-src "
        "data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = "".join(f"<style>{style}</style>" for style in styles)
    tail = "".join(f"<script>{script}</script>" for script in scripts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="generator" content="traincast {__version__}"><title>{escape_html(page.title)}</title>'
        f"{head}</head>"
        f"<body>{render_body(page)}{tail}</body></html>\n"
    )


def render_body(page: Page) -> str:
    """What stands between the page's styles and its scripts."""
    shown = [section for group in _arrange_sections(page.sections) for section in group]
    links = "".join(f'<li><a href="#{escape_html(s.key)}">{escape_html(s.title)}</a></li>' for s in shown)
    return (
        f'{read_asset("textures.svg")}<a class="skip" href="#main">Skip to the result</a>'
        f'<header><p class="brand">Traincast</p><h1>{escape_html(page.title)}</h1><p class="sub">'
        f"{escape_html(page.subtitle)}</p>"
        f'<nav aria-label="Sections"><ol>{links}</ol></nav></header><main id="main">'
        "<noscript><p>Timeline and charts need JavaScript; every figure stands in a table too.</p></noscript>"
        f"{render_sections(page)}</main><footer><p>Written by traincast {__version__}.</p></footer>"
        f'<script type="application/json" id="page-data">{encode_data(page.charts)}</script>'
    )


def render_sections(page: Page) -> str:
    """The tiles and the sections alone; those that are not wide share two columns with their neighbours."""
    html = [_render_tiles(page.tiles)]
    for sections in _arrange_sections(page.sections):
        alone = sections[0].wide or len(sections) == 1
        shown = "".join(_render_section(section, "both" if alone else "half") for section in sections)
        html.append(shown if alone else f'<div class="columns">{shown}</div>')
    return "".join(html)


def _arrange_sections(sections: Sequence[Section]) -> list[list[Section]]:
    """Neighbours that are wide, and those that are not; one of these between wide ones, with nothing alongside, goes to
    the next that are not."""
    groups = [list(group) for _, group in groupby(sections, key=lambda section: section.wide)]
    for number, group in enumerate(groups[:-2]):
        if number and not group[0].wide and len(group) == 1:
            groups[number + 2].insert(0, group.pop())
    return [group for group in groups if group]


def _render_section(section: Section, kind: str) -> str:
    key = escape_html(section.key)
    title = f'<h2 id="{key}-title">{escape_html(section.title)}</h2>'
    return f'<section id="{key}" class="{kind}" aria-labelledby="{key}-title">{title}{section.html}</section>'


def _render_tiles(tiles: Sequence[Tile]) -> str:
    shown = "".join(
        f'<div class="tile {escape_html(tile.kind)}"><dt>{escape_html(tile.label)}</dt><dd>'
        f"<b{'' if number else ' class=answer'}>{escape_html(tile.value)}</b>"
        f"<span>{escape_html(tile.note)}</span></dd></div>"
        for number, tile in enumerate(tiles)
    )
    return f'<dl class="tiles">{shown}</dl>' if shown else ""


def encode_data(data: Any) -> str:
    """JSON that may stand inside of a script element: nothing in it can end that element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def read_asset(name: str) -> str:
    """A file of the page's own: style, script or drawing."""
    return (files("traincast.app.pages") / "assets" / name).read_text(encoding="utf-8").strip()


def _hash_scripts(texts: Sequence[str]) -> str:
    digests = [b64encode(sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)

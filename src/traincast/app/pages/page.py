"""A page: its sections in order, put into one file that needs nothing else and lets nothing else in."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any, NamedTuple

from traincast.app.pages.elements import Html, escape_html
from traincast.utils.version import __version__

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
    links = "".join(f'<li><a href="#{escape_html(s.key)}">{escape_html(s.title)}</a></li>' for s in page.sections)
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
    for wide, group in groupby(page.sections, key=lambda section: section.wide):
        sections = list(group)
        alone = wide or len(sections) == 1
        shown = "".join(_render_section(section, "both" if alone else "half") for section in sections)
        html.append(shown if alone else f'<div class="columns">{shown}</div>')
    return "".join(html)


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

"""Pieces of HTML. Data in, HTML out; every string that is not `Html` already is escaped, since names come from files of
strangers. No piece carries a style or a script of its own: the page's policy would reject it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

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

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = {at: ' class="n"' if at in numbers else "" for at in kept}
        tags = {at: tag if cells[at] else "td" for at in kept}  # a heading without a word is none
        scopes = {at: ' scope="col"' if tags[at] == "th" else "" for at in kept}
        written = (f"<{tags[at]}{kinds[at]}{scopes[at]}>{escape_html(cells[at])}</{tags[at]}>" for at in kept)
        return f"<tr>{''.join(written)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return Html(
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape_html(caption)}"><table>'
        f"<caption>{escape_html(caption)}</caption><thead>{line(header, 'th')}</thead><tbody>{body}</tbody>"
        "</table></div>"
    )


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

"""HTML for notebooks: tables and lines of text. Data in, HTML out; everything that comes in is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A table; columns in `right` are right-aligned."""
    aligned = [' style="text-align:right"' if column in right else "" for column in range(len(header))]

    def line(row: Sequence[str], tag: str) -> str:
        cells = (f"<{tag}{align}>{escape(cell)}</{tag}>" for cell, align in zip(row, aligned, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"


def html_lines(text: str) -> str:
    """A paragraph with the line breaks of the text."""
    return f"<p>{'<br>'.join(escape(line) for line in text.splitlines())}</p>"


def html_folded(title: str, content: str) -> str:
    """HTML under a title that opens and closes; it begins closed."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"

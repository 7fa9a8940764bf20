"""What every public call returns can do: plain data, data frames, a few lines of text, HTML in a notebook."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from traincast.utils.errors import TraincastError, make_unknown_error
from traincast.utils.files.reading import format_path
from traincast.utils.files.writing import write_bytes

if TYPE_CHECKING:
    import polars as pl

Records = dict[str, list[dict[str, Any]]]
"""Rows by the name of their table; the columns of a row say their units (`iteration_ms`)."""

Item = TypeVar("Item")

_MOST_LINES = 10  # of a repr: a notebook cell or a debugger shows them without scrolling
_MOST_BARS = 10  # of a chart in a notebook: the largest come first
_MOST_ROWS = 20  # of a table in a notebook; `frames()` has them all


class Result:
    """A result. A subclass says what it is: `to_dict`, `headline` and, where it has rows, `records`.

    A dataclass among them is declared with `repr=False`, or it would hide the short `__repr__` of this class.
    """

    __slots__ = ()

    def to_dict(self) -> Any:
        """The whole answer as plain JSON values, the same document that the command line prints."""
        raise NotImplementedError(type(self).__name__)

    def headline(self) -> str:
        """What the result is, in a line or a few."""
        raise NotImplementedError(type(self).__name__)

    def records(self) -> Records:
        """The rows of the result by the name of their table; plain values."""
        return {}

    def frames(self) -> dict[str, pl.DataFrame]:
        """The tables of `records` that have rows as data frames. Needs polars."""
        try:
            import polars as pl
        except ImportError:
            raise TraincastError("data frames need polars: pip install 'traincast[data]'") from None
        tables = self.records().items()
        return {name: pl.DataFrame(rows, infer_schema_length=None) for name, rows in tables if rows}

    def to_polars(self, table: str | None = None) -> pl.DataFrame:
        """One of the tables of `records` (default: the first with rows) as a polars frame."""
        frames = self.frames()
        return frames[self._choose_table(table, frames)]

    def to_pandas(self, table: str | None = None) -> Any:
        """The same as a pandas frame. Needs pandas."""
        try:
            import pandas as pd  # type: ignore[import-untyped,import-not-found,unused-ignore]
        except ImportError:
            raise TraincastError("this needs pandas: pip install pandas") from None
        tables = {name: rows for name, rows in self.records().items() if rows}
        return pd.DataFrame(tables[self._choose_table(table, tables)])

    def plot(self, table: str | None = None) -> Any:
        """Bars of one table (default: the first in milliseconds) as matplotlib axes. Needs matplotlib."""
        try:
            import matplotlib.pyplot as plt  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise TraincastError("plots need matplotlib: pip install 'traincast[plot]'") from None
        tables = {name: rows for name, rows in self.records().items() if rows and _find_length(rows[0])}
        rows = tables[self._choose_table(table, tables)][:_MOST_BARS]
        length = _find_length(rows[0])
        names = [str(next(iter(row.values()))) for row in rows]
        _, axes = plt.subplots(figsize=(8, 0.4 * len(rows) + 1))
        axes.barh(names[::-1], [row[length] for row in rows][::-1])
        axes.set_xlabel("ms" if length.endswith("ms") else length)
        axes.set_title(self.headline().split("\n")[0], loc="left", fontsize=10)
        axes.figure.tight_layout()
        return axes

    def save(self, path: str | Path) -> Path:
        """Writes the result by the ending of a file: .json (the whole of it), .html (a report) or .csv (its first
        table)."""
        path = Path(path)
        if path.suffix == ".json":
            write_bytes(path, (json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n").encode())
        elif path.suffix == ".csv":
            tables = {name: rows for name, rows in self.records().items() if rows}
            write_bytes(path, encode_csv(tables[self._choose_table(None, tables)]))
        elif path.suffix == ".html" and _PAGES:
            _PAGES[0](self, path)
        else:
            raise TraincastError(f"'{format_path(path)}': give a file that ends in .json, .csv or .html")
        return path

    def _choose_table(self, table: str | None, known: Mapping[str, Any]) -> str:
        if not known:
            raise TraincastError(f"{type(self).__name__} has no such table")
        if table is not None and table not in known:
            raise make_unknown_error("table", table, known, f"There are {', '.join(known)}.")
        return table or next(iter(known))

    def chart(self) -> str:
        """What a notebook shows between the headline and the tables, as HTML; bars of the first table in ms unless a
        subclass knows better, nothing where there is none."""
        from traincast.utils.display.html import format_html_bars

        for name, rows in self.records().items():
            columns = list(rows[0]) if rows else []
            if columns[1:] == ["ms"]:
                shown = [(str(row[columns[0]]), float(row["ms"])) for row in rows[:_MOST_BARS]]
                return format_html_bars((columns[0], name), shown, unit="ms")
        return ""

    def __repr__(self) -> str:
        lines = self.headline().splitlines()
        left_out = [f"... {len(lines) - _MOST_LINES} lines more"] if len(lines) > _MOST_LINES else []
        return "\n".join([f"{type(self).__name__}: {lines[0]}", *lines[1:_MOST_LINES], *left_out])

    def _repr_html_(self) -> str:
        from traincast.utils.display.html import format_html_lines  # only notebooks need it

        tables = [_format_details(name, rows) for name, rows in self.records().items() if rows]
        return "".join([format_html_lines(repr(self)), self.chart(), *tables])


_PAGES: list[Callable[[Result, Path], object]] = []
"""What writes a result as a page; the package with the pages puts it here."""


def write_pages_with(write: Callable[[Result, Path], object]) -> None:
    """Lets `Result.save` write pages."""
    _PAGES[:] = [write]


def encode_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> bytes:
    """Rows as CSV, in these columns or all; lists and the like as JSON. Text that a spreadsheet would compute begins
    with an apostrophe."""
    columns = columns or list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = (row.get(column) for column in columns)
        writer.writerow([_make_csv_cell(cell) for cell in cells])
    return text.getvalue().encode("utf-8", "backslashreplace")


def _make_csv_cell(cell: Any) -> Any:
    if isinstance(cell, list | dict):
        return json.dumps(cell)
    if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return cell if re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", cell, re.IGNORECASE) else f"'{cell}"
    return cell


def _find_length(row: Mapping[str, Any]) -> str:
    """The column of a row that bars are as long as: milliseconds, or ""."""
    return next((name for name, value in row.items() if name.endswith("ms") and _is_number(value)), "")


class ResultList(Result, Sequence[Item]):
    """A result that is a sequence: a subclass says what its items are."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = tuple(items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


def drop_nested_values(row: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a row: what is itself a list or a dictionary is left out.

    >>> flat({"gpus": 8, "interval_ms": [1.0, 2.0]})
    {'gpus': 8}
    """
    return {name: value for name, value in row.items() if not isinstance(value, (dict, list))}


def _format_details(name: str, rows: list[dict[str, Any]]) -> str:
    from traincast.utils.display.html import format_html_details, format_html_table

    header = list(dict.fromkeys(column for row in rows for column in row))
    shown = rows[:_MOST_ROWS]
    numbers = [at for at, column in enumerate(header) if any(_is_number(row.get(column)) for row in shown)]
    more = f", the first {_MOST_ROWS} of them here" if len(rows) > len(shown) else ""
    title = f"{name} ({len(rows)} row{'s' * (len(rows) > 1)}{more})"
    return format_html_details(
        title, format_html_table(header, [[_format_cell(row.get(c)) for c in header] for row in shown], right=numbers)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format_cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

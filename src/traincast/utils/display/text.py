"""Plain terminal text: aligned tables and bars. Data in, text out."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BARS = _EIGHTHS + "▓░"
_LONG_WORD, _SHORT_BAR = 26, 10  # characters: of a column with a longer word, and of bars, at least
_UNIT = re.compile(r"(?<=\d) (?=(?:%|(?:ms|s|min|h|days|us|[kMG]?B|TB|k|M|T|GPUs?)\b))")  # before a unit
_width: ContextVar[float] = ContextVar("width", default=math.inf)  # columns of the terminal


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns aligned by their widest cell; columns in `right` are right-aligned. A row of one cell is a heading above
    those that follow. Inside `use_width` a table that is too wide has its longest texts in several lines or, where that
    is not enough, its columns in several tables, each with the first column."""
    cells = [row for row in (header, *rows) if len(row) > 1 or len(header) == 1]
    natural = [max(len(row[i]) for row in cells) for i in range(len(header))]
    least = [_find_least_width([row[i] for row in cells]) for i in range(len(header))]
    least[0] = max(least[0], min(natural[0], _LONG_WORD))  # names are read whole
    room = _width.get()
    shown = _count_fitting(least, room) if sum(natural) + 2 * (len(natural) - 1) > room else len(header)
    table = _format_lines(header, rows, right, _narrow_columns(natural[:shown], least[:shown], room))
    if shown == len(header):
        return table
    kept = [0, *range(shown, len(header))]
    others = [row if len(row) == 1 else [row[i] for i in kept] for row in rows]
    again = [place for place, i in enumerate(kept) if i in right]
    return f"{table}\n\n{format_table([header[i] for i in kept], others, right=again)}"


@contextmanager
def use_width(columns: float) -> Iterator[None]:
    """Tables that are written inside are at most so many columns wide."""
    before = _width.set(columns)
    try:
        yield
    finally:
        _width.reset(before)


def _format_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], widths: Sequence[int]
) -> str:
    longest = [max(len(row[i]) for row in (header, *rows) if len(row) == len(header)) for i in range(len(widths))]

    def lines(row: Sequence[str], *, low: bool = False) -> list[str]:
        if len(row) < len(header):
            return ["", row[0]]
        parts = [_wrap_cell(*cell) for cell in zip(row, longest, widths, strict=False)]
        height = max(map(len, parts))
        empty = [[""] * (height - len(part)) for part in parts]
        columns = [gap + part if low else part + gap for part, gap in zip(parts, empty, strict=True)]
        return ["  ".join(_align(column[line], widths[i], i in right) for i, column in enumerate(columns)).rstrip()
                for line in range(height)]  # fmt: skip

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([*lines(header, low=True), rule, *(line for row in rows for line in lines(row))])


def _align(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _wrap_cell(cell: str, longest: int, width: int) -> list[str]:
    """The lines of a cell in a column whose `longest` cell was to be narrowed to `width`; bars get shorter instead, all
    by the same share."""
    if longest <= width or not cell:
        return [cell]
    if _is_bar(cell):
        length = max(1, round(len(cell) * width / longest))
        return ["".join(cell[at * len(cell) // length] for at in range(length))]
    return wrap_words(cell, width) or [""]


def wrap_words(text: str, width: int, *, indent: str = "", hanging: str = "", long_words: bool = True) -> list[str]:
    """Lines of at most so many characters; a number and its unit stay together."""
    bound = _UNIT.sub("\u00a0", text)
    lines = textwrap.wrap(bound, width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False,
                          break_long_words=long_words)  # fmt: skip
    return [line.replace("\u00a0", " ") for line in lines]


def _is_bar(cell: str) -> bool:
    return not cell.strip(_BARS)


def _find_least_width(cells: Sequence[str]) -> int:
    """Characters below which a column cannot be read: its longest word, of a bar a few."""
    if all(map(_is_bar, cells)):
        return min(_SHORT_BAR, max(map(len, cells)))
    words = (word for cell in cells for word in _UNIT.sub("_", cell).split(" "))
    return min(max(map(len, words)), _LONG_WORD)


def _narrow_columns(natural: Sequence[int], least: Sequence[int], room: float) -> list[int]:
    """The widths with the widest columns narrowed until all are in the room, none below its least."""
    widths = list(natural)
    while sum(widths) + 2 * (len(widths) - 1) > room:
        wide = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not wide:
            break
        widths[max(wide, key=lambda i: widths[i])] -= 1
    return widths


def _count_fitting(least: Sequence[int], room: float) -> int:
    """How many of the first columns can be in the room; two at least."""
    ends = [sum(least[: i + 1]) + 2 * i for i in range(len(least))]
    return max(2, sum(end <= room for end in ends)) if len(least) > 1 else 1


def format_bar(fraction: float, width: int = 30) -> str:
    """A horizontal bar of `fraction` of `width` characters, to an eighth of a character."""
    eighths = round(max(0.0, min(fraction, 1.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def format_milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with sensible digits: `0.012`, `3.46`, `812`."""
    ms = 1e3 * seconds
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 100 else f"{ms:,.0f}"


def format_quantity(number: float, unit: str) -> str:
    """A physical quantity in short with the prefix of its thousands: `64.6 GB`, `1.3 TFLOP`."""
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def format_count(number: float) -> str:
    """A number in short, in three digits: `774 M`, `1.3 B`, `8.31`."""
    for limit, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def format_gigabytes(nbytes: float) -> str:
    """A size in GB without its unit, three digits at least: `0.828`, `3.00`, `282,924`.

    >>> format_gigabytes(8.28e8), format_gigabytes(2.996e9), format_gigabytes(2.829245e14)
    ('0.828', '3.00', '282,924')
    """
    return f"{nbytes / 1e9:,.0f}" if nbytes >= 999.5e9 else f"{nbytes / 1e9:#.3g}".rstrip(".")


def format_duration(seconds: float) -> str:
    """A time in the unit that people say it in: `0.31 ms`, `29.0 ms`, `17.5 s`, `3.2 h`, `41 days`.

    >>> format_duration(0.0284), format_duration(17.48), format_duration(5.0e6)
    ('28.4 ms', '17.5 s', '57.9 days')
    """
    if seconds < 10:
        return f"{format_milliseconds(seconds)} ms" if not 0.01 <= seconds < 0.1 else f"{1e3 * seconds:.1f} ms"
    for limit, unit in ((86400.0, "days"), (3600.0, "h"), (600.0, "min")):
        if seconds >= 2 * limit or (unit == "min" and seconds >= limit):
            return f"{seconds / (60.0 if unit == 'min' else limit):,.1f} {unit}"
    return f"{seconds:.1f} s"


def format_interval(limits: tuple[float, float]) -> str:
    """Two times in seconds: `254 to 317 ms`, `950 ms to 12.1 s`."""
    low, high = (format_duration(limit) for limit in limits)
    number, _, unit = low.rpartition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def format_dollars(dollars: float) -> str:
    """Money in short: `$11.0 M`, `$1,234`, `$12.34`, `$0.0045`; never an exponent.

    >>> [format_dollars(x) for x in (1.1021e7, 1234.5, 12.345, 0.0045151, 5.736e-05)]
    ['$11.0 M', '$1,234', '$12.35', '$0.0045', '$0.000057']
    """
    for limit, suffix in ((1e9, " B"), (1e6, " M")):
        if dollars >= limit:
            return f"${dollars / limit:,.1f}{suffix}"
    if dollars >= 1:
        return f"${dollars:,.0f}" if dollars >= 1000 else f"${dollars:.2f}"
    digits = max(2, 1 - math.floor(math.log10(dollars))) if dollars > 0 else 2
    return f"${dollars:.{digits}f}"


def format_energy(kilowatt_hours: float) -> str:
    """Energy in short: `3.09 GWh`, `0.681 Wh`."""
    watt_hours = 1e3 * kilowatt_hours
    return format_quantity(watt_hours, "Wh") if watt_hours >= 1 else f"{watt_hours:.2g} Wh"


def count_of(number: int, noun: str) -> str:
    """`1 GPU`, `8 GPUs`, `1,024 GPUs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten_name(name: str, longest: int = 60) -> str:
    """A name that fits, with its beginning and its end where it does not.

    >>> shorten_name("vectorized_elementwise_kernel<4, add>", 24)
    'vectorized_...el<4, add>'
    """
    half = (longest - 3) // 2
    return name if len(name) <= longest else f"{name[: longest - 3 - half]}...{name[-half:]}"

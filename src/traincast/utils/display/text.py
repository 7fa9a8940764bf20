"""Plain terminal text: aligned tables and bars. Data in, text out."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns aligned by their widest cell; columns in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["─" * w for w in widths]), *(line(row) for row in rows)])


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
    """A large number in short: `774 M`, `1.3 B`."""
    for limit, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}"

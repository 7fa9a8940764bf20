"""Plain terminal text: aligned tables and bars. Data in, text out."""

from __future__ import annotations

import math
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

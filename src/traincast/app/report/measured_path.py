"""The critical path of a measured run and what faster parts would bring, as text."""

from __future__ import annotations

from collections.abc import Mapping

from traincast.traces.replay.path import PathReport
from traincast.utils.display.text import format_bar, shorten_name

_TOP = 6  # rows of a table: a page shows the largest, JSON all
_SHORT = 3  # parts of a path that a sentence names
_LEAST_GAIN = 0.001  # what is less is shown as 0.0 %


def format_path_shares(path: PathReport, most: int = _TOP) -> str:
    """Shares of the path, and the steps' gain for everything that would bring one."""
    lines = ["Critical path (share of the steps' time, what would save most first)"]
    lines += [f"  {name:<40} {share:>6.1%}  {format_bar(share)}" for name, share in list(path.by_what.items())[:most]]
    lines += ["  of which under these ops:"]
    ops = list(path.by_op.items())[:most]
    lines += [f"    {shorten_name(name or 'between ops', 38):<38} {share:>6.1%}" for name, share in ops]
    lines += _format_taken_over(path)
    return "\n".join(
        [*lines, "", "Twice as fast, a step is shorter by", *format_gains(path.faster, width=40, most=most)]
    )


def _format_taken_over(path: PathReport) -> list[str]:
    """What else holds a step, where another path takes over as soon as the first part of this one gets faster."""
    if not path.after:
        return []
    what = path.most
    after = ", ".join(f"{name} {share:.0%}" for name, share in list(path.after.items())[:_SHORT])
    return [f"  half the time for {what} gains {path.faster[what]:.1%} only: then another path holds ({after})"]


def format_gains(gains: Mapping[str, float], width: int, most: int = 1000) -> list[str]:
    """What would bring how much, with names of at most `width` letters, and what would bring nothing."""
    lines = [
        f"  {shorten_name(name, width):<{width}} {gain:>6.1%}  {format_bar(gain)}"
        for name, gain in list(gains.items())[:most]
        if gain >= _LEAST_GAIN
    ]
    nothing = [name for name, gain in list(gains.items())[:most] if gain < _LEAST_GAIN]
    return [*lines, f"  nothing by: {', '.join(nothing)}"] if nothing else lines

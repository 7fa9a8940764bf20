"""The critical path of a measured run and what faster parts would bring, as text."""

from __future__ import annotations

from collections.abc import Mapping

from traincast.display.text import bar
from traincast.replay.path import PathReport

_TOP = 6  # rows of a table: a page shows the largest, JSON all
_LITTLE = 0.125  # gain for each share of the path; half of the time would be 0.5
_LEAST_GAIN = 0.001  # what is less is shown as 0.0 %


def path_text(path: PathReport) -> str:
    """Shares of the path, and the steps' gain for everything that would bring one."""
    lines = ["Critical path (share of the steps' time)"]
    lines += [f"  {name:<40} {share:>6.1%}  {bar(share)}" for name, share in list(path.by_what.items())[:_TOP]]
    lines += ["  of which under these ops:"]
    ops = list(path.by_op.items())[:_TOP]
    lines += [f"    {(name or 'between ops')[:38]:<38} {share:>6.1%}" for name, share in ops]
    lines += _as_long(path)
    return "\n".join([*lines, "", "Twice as fast, a step is shorter by", *gain_lines(path.faster, width=40)])


def _as_long(path: PathReport) -> list[str]:
    """A line where what has most of the path would gain next to nothing: another path is nearly as long."""
    what, share = next(iter(path.by_what.items()), ("", 0.0))
    gain = path.faster.get(what)
    if gain is None or gain >= _LITTLE * share:
        return []
    return [f"  another path is nearly as long: half the time for {what} shortens a step by {gain:.1%} only"]


def gain_lines(gains: Mapping[str, float], width: int) -> list[str]:
    """What would bring how much, with names of at most `width` letters, and what would bring nothing."""
    lines = [
        f"  {name[:width]:<{width}} {gain:>6.1%}  {bar(gain)}" for name, gain in gains.items() if gain >= _LEAST_GAIN
    ]
    nothing = [name for name, gain in gains.items() if gain < _LEAST_GAIN]
    return [*lines, f"  nothing by: {', '.join(nothing)}"] if nothing else lines

"""The critical path of a measured run and what faster parts would bring, as text and as JSON."""

from __future__ import annotations

from typing import Any

from traincast.display.text import bar
from traincast.replay.path import PathReport

_TOP = 6
_LEAST_GAIN = 0.001


def path_text(path: PathReport) -> str:
    """Shares of the path, and the steps' gain for everything that would bring one."""
    lines = ["Critical path (share of the steps' time)"]
    lines += [f"  {name:<40} {share:>6.1%}  {bar(share)}" for name, share in list(path.by_what.items())[:_TOP]]
    lines += ["  of which under these ops:"]
    ops = list(path.by_op.items())[:_TOP]
    lines += [f"    {(name or 'between ops')[:38]:<38} {share:>6.1%}" for name, share in ops]
    lines += ["", "Twice as fast, a step is shorter by"]
    shown = [(name, gain) for name, gain in path.faster.items() if gain >= _LEAST_GAIN]
    lines += [f"  {name[:40]:<40} {gain:>6.1%}  {bar(gain)}" for name, gain in shown]
    nothing = [name for name, gain in path.faster.items() if gain < _LEAST_GAIN]
    if nothing:
        lines.append(f"  nothing by: {', '.join(nothing)}")
    return "\n".join(lines)


def path_json(path: PathReport) -> dict[str, Any]:
    """Shares and gains, and the path itself in microseconds from the trace's first moment."""
    return {
        "share_by_what": path.by_what,
        "share_by_op": path.by_op,
        "twice_as_fast_saves": path.faster,
        "segments": [
            {"what": s.what, "op": s.op, "name": s.name, "start_us": round(1e6 * s.start, 3),
             "length_us": round(1e6 * (s.end - s.start), 3)}
            for s in path.segments
        ],
    }  # fmt: skip

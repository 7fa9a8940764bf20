"""Two traced runs side by side, as text."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.app.report.measured_verdict import PART_NAMES
from traincast.traces.replay.compare import Change, TraceComparison
from traincast.utils.display.text import format_milliseconds, format_table, shorten_name


def format_comparison(comparison: TraceComparison, top: int) -> str:
    """The step and its parts, then families, ops by shape and the host's time, at most `top` changes of each."""
    lines = [*_state_comparison(comparison), ""]
    predicted = bool(comparison.interval)
    for title, first, changes, shapes in (
        ("The step, by what it was spent on", "part", comparison.parts, False),
        ("Kernel time by family", "family", comparison.families, False),
        ("Kernel time by module, backward included", "module", comparison.modules, False),
        (f"Kernel time by op{'' if predicted else ' and shape'}", "op", comparison.ops, not predicted),
        ("Kernel time by call tree", "ops, outermost first", comparison.calls, False),
        ("Host time by top-level op", "op", comparison.host, False),
    ):
        if not changes:
            continue
        lines += [
            f"{title}; ms of a step, the largest change first",
            _format_changes(first, changes[:top], shapes=shapes, predicted=predicted),
        ]
        rest = sum(change.change for change in changes[top:])
        lines += [f"  {len(changes) - top} more change it by {1e3 * rest:+.3f} ms"] if len(changes) > top else []
        lines.append("")
    if predicted:
        lines += _advise(comparison)
    return "\n".join(lines).rstrip()


def _advise(comparison: TraceComparison) -> list[str]:
    """What to do with the difference between a prediction and the run."""
    lines = [] if comparison.modules else [
        "By module: the trace does not name its modules; record it with `traincast.profile(modules=model)`.",
    ]  # fmt: skip
    return [
        *lines,
        f"'traincast fit' refines a GPU from {comparison.names[1]}, which corrects later predictions.",
    ]


def _state_comparison(comparison: TraceComparison) -> list[str]:
    """Both steps, and the part and the op that explain most of the difference; before is the prediction, if one is."""
    named = []
    for changes in (comparison.parts, comparison.ops):
        largest = max(changes, key=lambda change: abs(change.change), default=None)
        if largest is not None and largest.change:
            name = PART_NAMES.get(largest.name, largest.name)
            named.append(f"{name} {1e3 * largest.change:+.3g} ms")
    return [comparison.headline(), *([f"Most of it: {'; by op: '.join(named)}."] if named else [])]


def _format_changes(first: str, changes: Sequence[Change], *, shapes: bool, predicted: bool) -> str:
    rows = [
        (
            shorten_name(PART_NAMES.get(c.name, c.name), 40),
            *((shorten_name(c.shapes, 40),) if shapes else ()),
            *(() if predicted else (f"{c.count_before:.3g}", f"{c.count_after:.3g}")),
            format_milliseconds(c.before),
            format_milliseconds(c.after),
            f"{1e3 * c.change:+z.3f}",
            "" if c.share is None else f"{c.share:z.0%}",
        )
        for c in changes
    ]
    times = ("predicted ms", "measured") if predicted else ("count before", "after", "ms before", "after")
    start = 2 if shapes else 1
    header = (first, *(("shapes",) if shapes else ()), *times, "change", "share")
    return format_table(header, rows, right=range(start, len(header)))

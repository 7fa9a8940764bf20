"""Whether a step fits, for the terminal: the verdict first."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.planner.fitting.fit import Fit
from traincast.planner.fitting.remedies import Remedy
from traincast.utils.display.text import count_of, format_duration, format_interval, format_milliseconds, format_table

_SHOWN = 5


def format_remedies(remedies: Sequence[Remedy]) -> str:
    """Changes under which a step that does not fit would, the cheapest first."""
    if not remedies:
        return "none of the changes that were tried makes it fit; give more GPUs or a smaller model"
    rows = [
        (one.text, f"{one.prediction.memory.used_bytes / 1e9:.1f}",
         f"{one.prediction.memory.fit_probability:.0%}", format_milliseconds(one.prediction.iteration),
         f"{1e6 * one.seconds_per_sample:,.0f}")
        for one in remedies
    ]  # fmt: skip
    header = ("would fit with, cheapest first", "GB used", "fits with", "ms per step", "GPU us per sample")
    return format_table(header, rows, right=(1, 2, 3, 4))


def format_fit(fit: Fit) -> str:
    """The verdict, what fills the peak, and what would make the step fit."""
    memory, p = fit.memory, fit.prediction
    low, high = (bound / 1e9 for bound in memory.used_interval)
    lines = [
        f"{fit.headline()}.{_state_help(fit)}",
        f"A step takes {format_duration(p.iteration)} (90 % interval {format_interval(p.interval)}). "
        f"{p.trust.sentence}",
        f"{p.workload.name}, batch {p.workload.batch_size}, {count_of(p.gpus, 'GPU')}: "
        f"{memory.allocated_bytes / 1e9:.2f} GB allocated, {memory.reserved_bytes / 1e9:.2f} reserved, "
        f"{memory.used_bytes / 1e9:.2f} used (90 %: {low:.1f} to {high:.1f}){_state_difference(fit)}",
        "",
    ]
    rows = [
        (one["category"].replace("_", " "), one["module"] or "-", one["line"] or "-", f"{one['count']:,}",
         f"{one['gb']:.2f}") for one in fit.list_culprits(_SHOWN)
    ]  # fmt: skip
    lines.append(format_table(("largest at the peak", "module", "line", "blocks", "GB"), rows, right=(3, 4)))
    if not fit.fits:
        lines += ["", format_remedies(fit.remedies)]
    if fit.largest is not None:
        found = fit.largest
        sure = f" (fits with {found.probability:.0%})" if found.value else ": nothing fits"
        lines += ["", f"largest {found.axis} that fits: {found.text}{sure}"]
    return "\n".join(lines)


def _state_difference(fit: Fit) -> str:
    """Why the verdict has another number than what is used, where it has."""
    p, memory = fit.prediction, fit.memory
    if p.left_out_bytes:
        return f"; {p.left_out_bytes / 1e9:.1f} GB more with all rows of its tables"
    if fit.fits and memory.used_bytes > memory.limit_bytes:
        return f"; {memory.required_bytes / 1e9:.1f} are enough, the allocator gives back what it caches"
    hosted = f"; {memory.host_bytes / 1e9:.1f} GB of host memory"
    return hosted if memory.host_bytes > 1e9 else ""


def _state_help(fit: Fit) -> str:
    """What would help most, where it does not fit."""
    return f" It would with {fit.remedies[0].text}." if fit.remedies else ""

"""A prediction, its ranks, a scaling curve, and whether a step fits, as text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from traincast.simulator.collective_calls import format_rank_list
from traincast.simulator.prediction.prediction import RELEASE_SPREAD
from traincast.simulator.prediction.rank_results import Note
from traincast.simulator.prediction.result import Prediction, split_step, state_verdict
from traincast.simulator.scenario.resolved import format_settings
from traincast.utils.display.text import format_bar, format_milliseconds, format_table

_MOST_ROWS = 16


def format_ranks(p: Prediction) -> str:
    """A table of the ranks that compute longest, and who holds the others back."""
    busiest = sorted(p.ranks, key=lambda result: (-result.compute, result.ranks))
    shown = busiest[:_MOST_ROWS]
    rows = [
        (
            format_rank_list(result.ranks),
            format_milliseconds(result.compute),
            format_milliseconds(result.exposed_comm),
            format_milliseconds(result.waiting),
            f"{result.memory.peak_bytes / 1e9:.1f}",
            format_bar(result.compute / p.iteration),
        )
        for result in shown
    ]
    lines = [format_table(("ranks", "compute", "exposed", "waiting", "GB", ""), rows, right=(1, 2, 3, 4))]
    if len(busiest) > len(shown):
        left = sum(len(result.ranks) for result in busiest[_MOST_ROWS:])
        lines.append(f"and {left} ranks that compute less")
    if len(p.ranks) > 1:
        (rank, op), seconds = next(iter(p.path_by_place.items()))
        lines.append(
            f"the busiest rank computes {p.imbalance:.1%} longer than the mean; "
            f"most of the critical path: {op} on rank {rank} ({seconds / p.iteration:.0%} of the step)"
        )
    return "\n".join(lines)


_MOST_OPS = 5
_MOST_OUTSIDE = 3
_MOST_PLACES = 25  # rows: what a screen holds; JSON has them all


def format_prediction(p: Prediction, by: str | None = None, *, full: bool = False) -> str:
    """The result as a page: the verdict, what the step is made of, notes. `by` one of `PLACES` adds kernel time by
    those, `full` what the interval and the durations come from."""
    ranks = [format_ranks(p), ""] if p.gpus > 1 and p.parallel is None else []
    waits = [_format_shares("what the slowest rank waits for", dict(split_step(p))), ""] if p.parallel else []
    places = [_format_places(p, by), ""] if by else []
    shown = [_format_split(p), "", *waits, *ranks, _format_families(p), "", *places, _format_footer(p, full=full)]
    return "\n".join([*format_verdict(p), "", *shown])


def format_verdict(p: Prediction) -> list[str]:
    """What was asked, the verdict, and what that makes of the GPUs."""
    title, size, *rates = p.headline().split("\n")
    return [f"{title}, {size.partition(':')[0]}", *state_verdict(p), *rates]


def format_remarks(remarks: Iterable[str]) -> list[str]:
    """Warnings first, then notes, each under its own name."""
    ordered = sorted(remarks, key=lambda remark: isinstance(remark, Note))
    return [f"{'note' if isinstance(remark, Note) else 'warning'}: {remark}" for remark in ordered]


def _format_split(p: Prediction) -> str:
    parts = [("device active", p.device_active), ("device idle", p.device_idle), ("host busy", p.host)]
    if p.gpus > 1:
        parts.insert(1, ("exposed communication", p.exposed_comm))
    rows = [
        (name, format_milliseconds(seconds), f"{seconds / p.iteration:6.1%}", format_bar(seconds / p.iteration))
        for name, seconds in parts
    ]
    path = ", ".join(f"{what} {seconds / p.iteration:.0%}" for what, seconds in _format_top(p.path_by_activity, 4))
    return format_table(("", "ms", "of step", ""), rows, right=(1, 2)) + f"\ncritical path: {path}"


def _format_top(parts: dict[str, float], n: int) -> list[tuple[str, float]]:
    return list(parts.items())[:n]


def _format_families(p: Prediction) -> str:
    return _format_shares("kernels", p.by_family)


def _format_places(p: Prediction, by: str) -> str:
    """Kernel time by module, layer or op, the largest first."""
    spent = {"module": p.by_module, "layer": p.by_layer, "op": p.by_op}[by]
    shown = dict(list(spent.items())[:_MOST_PLACES])
    rest = {f"{len(spent) - len(shown)} more": sum(spent.values()) - sum(shown.values())}
    return _format_shares(by, shown | (rest if len(spent) > len(shown) else {}))


def _format_shares(what: str, parts: dict[str, float]) -> str:
    total = sum(parts.values()) or 1.0
    rows = [
        (name, format_milliseconds(seconds), f"{seconds / total:6.1%}", format_bar(seconds / total))
        for name, seconds in parts.items()
    ]
    return format_table((what, "ms", "share", ""), rows, right=(1, 2))


def _format_footer(p: Prediction, *, full: bool) -> str:
    lines = [_format_memory(p)]
    if full:
        whole = sum(p.by_source.values()) or 1.0
        sources = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in p.by_source.items())
        lines.append(f"{len(p.timeline.launches)} kernels; durations: {sources}; host profile: {p.host_profile}")
        lines.append(_format_interval(p))
    if p.scenario:
        lines.append(f"settings: {format_settings(p.scenario)}")
    if p.estimated_ops:
        notes = "without a kernel model (costed from bytes and flops)"
        lines.append(_format_marked(notes, p.estimated_ops, p.estimated_seconds, p))
    lines += _format_outside(p) if full else []
    return "\n".join([*lines, *format_remarks(p.warnings)])


def _format_interval(p: Prediction) -> str:
    """What the interval is made of, each as one standard deviation."""
    terms = ", ".join(f"{name.replace('_', ' ')} {sigma:.0%}" for name, sigma in p.interval_terms.items())
    return f"interval from {terms or 'nothing'} (standard deviations)"


def _format_memory(p: Prediction) -> str:
    """The peak of the fullest rank, and what it is made of as far as two decimals show it."""
    shown = {
        kind: f"{nbytes / 1e9:,.2f}" for kind, nbytes in sorted(p.memory.by_kind.items(), key=lambda item: -item[1])
    }
    parts = ", ".join(f"{kind.replace('_', ' ')} {size}" for kind, size in shown.items() if size != "0.00")
    return f"allocated at the peak {format_peak_memory(p)}" + (f": {parts}" if parts else "")


def format_peak_memory(p: Prediction) -> str:
    """The peak of the fullest rank, and how much a device has where that is known: `1.20 GB of 80 GB`."""
    limit = p.platform.device.memory_bytes
    return f"{p.memory.peak_bytes / 1e9:,.2f} GB" + (f" of {limit / 1e9:.0f} GB" if math.isfinite(limit) else "")


def _format_marked(what: str, ops: tuple[str, ...], seconds: float, p: Prediction) -> str:
    """`12% of kernel time without a kernel model: aten::mm, aten::bmm and 7 more`."""
    share = seconds / max(sum(p.by_family.values()), 1e-30)
    more = f" and {len(ops) - _MOST_OPS} more" if len(ops) > _MOST_OPS else ""
    return f"{share:.0%} of kernel time {what}: {', '.join(ops[:_MOST_OPS])}{more}"


def _format_outside(p: Prediction) -> list[str]:
    """The ops outside of what was fitted that matter for the step's time, which is where they leave more open than the
    next release of the software does: by how much, how far outside and why."""
    notable = sorted((item for item in p.outside if item.shift > RELEASE_SPREAD), key=lambda item: -item.shift)
    if not notable:
        return []
    named = ", ".join(f"{item.op} {item.shift:.0%} ({item.why})" for item in notable[:_MOST_OUTSIDE])
    more = f" and {len(notable) - _MOST_OUTSIDE} more" if len(notable) > _MOST_OUTSIDE else ""
    return [f"outside what was fitted, by standard deviation of the step: {named}{more}"]

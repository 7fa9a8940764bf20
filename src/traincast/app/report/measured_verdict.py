"""What traced runs come down to, as text: the verdict, and the critical path with what would shorten it."""

from __future__ import annotations

from collections.abc import Mapping

from traincast.traces.breakdown import PARTS
from traincast.traces.replay.compare import find_slowest_rank
from traincast.traces.replay.path import PathReport
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.utils.display.text import count_of, format_bar, format_duration, format_interval, shorten_name

PART_NAMES = dict(zip(PARTS, (
    "compute", "exposed communication", "idle: host-bound", "idle: host in a synchronisation",
    "idle: a stream waited for another", "idle: before graph nodes", "idle: launched, not yet started",
    "idle: reason not recorded",
), strict=True))  # fmt: skip
"""The parts of a step in words."""
_SPREAD = 1.1  # longest over shortest step from which on they differ
_LEAST_GAIN = 0.02  # of a step: less is not worth a word


def state_traces(report: TraceReport) -> list[str]:
    """The verdict of one rank, or of all together and of the slowest one."""
    rank = find_slowest_rank(report)
    device = f" on {rank.linked.trace.device_name}" if rank.linked.trace.device_name else ""
    steps = f"median of {count_of(len(rank.steps), 'step')}{_state_spread(rank)}{device}"
    lines = [f"{format_duration(rank.median_step.step)} per step, {steps}: {_state_parts(rank)}."]
    if not report.is_one_job:
        many = count_of(len(report.ranks), "trace")
        return [
            f"Slowest of {many} is {rank.linked.trace.path.name}, {lines[0]}",
            "They are no ranks of one job: not all have collectives; each is a step of its own.",
            *_state_culprit(rank),
            *(f"note: {note}" for note in (report.together.notes if report.together else ())),
        ]
    if report.together:
        figures = report.together.breakdown
        lines = [
            f"{format_duration(figures.step)} per step over {count_of(len(report.ranks), 'rank')}{device}; "
            f"exposed communication {figures.eg_comm:.1%}, imbalance of ranks {figures.eg_imbalance:.1%}.",
            f"Slowest is rank {rank.rank}, {lines[0]}",
        ]
    return [*lines, *_state_culprit(rank)]


def _state_spread(rank: RankReport) -> str:
    """The shortest and the longest step and their mean, where one number does not stand for all."""
    lengths = [step.step for step in rank.steps]
    if max(lengths) < _SPREAD * min(lengths):
        return ""
    mean = sum(lengths) / len(lengths)
    return f" ({format_interval((min(lengths), max(lengths)))}, mean {format_duration(mean)})"


def _state_parts(rank: RankReport) -> str:
    """How busy the device is, and what most of the rest is."""
    step = rank.median_step
    whole = step.step or 1.0
    idle = [(name, getattr(step, name) / whole) for name in PARTS[1:]]
    name, share = max(idle, key=lambda pair: pair[1])
    rest = f", {PART_NAMES[name]} {share:.0%}" if share >= _LEAST_GAIN else ""
    return f"the device is busy {step.active / whole:.0%}{rest}"


def _state_culprit(rank: RankReport) -> list[str]:
    """The op with most of the critical path, and what would gain most."""
    path = rank.path
    ops = [(name, share) for name, share in path.by_op.items() if name]
    if not ops:
        return []
    name, share = max(ops, key=lambda pair: pair[1])
    if share < min(_LEAST_GAIN, path.by_op.get("", 0.0)):
        return [f"Code between ops is {path.by_op['']:.0%} of the critical path: no op is on record there."]
    gain = f"; in half the time it would save {path.faster[name]:.0%} of the step" if name in path.faster else ""
    what = f", {path.most} in all {path.by_what[path.most]:.0%}" if path.most else ""
    return [f"{shorten_name(name)} is {share:.0%} of the critical path{what}{gain}."]


_TOP = 6  # rows of a table: a page shows the largest, JSON all
_SHORT = 3  # parts of a path that a sentence names
_SHOWN_GAIN = 0.001  # what is less is shown as 0.0 %


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
        if gain >= _SHOWN_GAIN
    ]
    nothing = [name for name, gain in list(gains.items())[:most] if gain < _SHOWN_GAIN]
    return [*lines, f"  nothing by: {', '.join(nothing)}"] if nothing else lines

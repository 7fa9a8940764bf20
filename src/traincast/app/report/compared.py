"""Measured traces in a few sentences, two runs side by side, and a traced run against its prediction, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from traincast.traces.breakdown import PARTS
from traincast.traces.classify import COMMUNICATION
from traincast.traces.replay.analysis import count_lost_kernels
from traincast.traces.replay.attribution import OWN_HOST, Attribution, Pair
from traincast.traces.replay.compare import Change, TraceComparison, find_slowest_rank
from traincast.traces.replay.host import KEPT as KEPT_HOST
from traincast.traces.replay.host import SET_UP
from traincast.traces.replay.kernels import Known
from traincast.traces.replay.path import BACKLOG, GRAPH, HOST, LATE, PathReport
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.utils.display.text import (
    count_of,
    format_bar,
    format_duration,
    format_interval,
    format_milliseconds,
    format_table,
    shorten_name,
)

PART_NAMES = dict(zip(PARTS, (
    "compute", "exposed communication", "idle: host-bound", "idle: host in a synchronisation",
    "idle: a stream waited for another", "idle: before graph nodes", "idle: launched, not yet started",
    "idle: reason not recorded",
), strict=True))  # fmt: skip
"""The parts of a step in words."""
_SPREAD = 1.1  # longest over shortest step from which on they differ
_LEAST_GAIN = 0.02  # of a step: less is not worth a word
_LEAST_MODELLED = 0.005  # of kernel time, below which a step on its own GPU and host is no prediction
_LOW_CLOCK = 2.0  # the trace of a T4 has 3.4, twelve others of seven GPUs 0.8 to 1.3
_KERNELS = "kernels"
_HOLDERS = {
    HOST: "the host", COMMUNICATION: "communication", GRAPH: "waits before graph nodes",
    LATE: "kernels that start late", BACKLOG: "work launched before the trace",
}  # fmt: skip


def state_traces(report: TraceReport) -> list[str]:
    """The verdict of one rank, or of all together and of the slowest one: what a step takes and what holds it, then of
    which steps that is said and which op is most of it."""
    rank = find_slowest_rank(report)
    verdict = f"{_state_step(rank)}: {_state_parts(rank)}."
    rest = " ".join(filter(None, (_state_steps(rank), _state_culprit(rank))))
    lines = [verdict, rest] if rest else [verdict]
    if not report.is_one_job:
        return [
            f"Slowest of {count_of(len(report.ranks), 'trace')} is {rank.linked.trace.path.name}, {verdict}",
            *lines[1:],
            "They are no ranks of one job: not all have collectives; each is a step of its own.",
            *(f"note: {note}" for note in (report.together.notes if report.together else ())),
        ]
    if report.together:
        figures, path = report.together.breakdown, report.together.path
        holder, share = max(path.by_rank.items() if path else [(-1, 0.0)], key=lambda pair: pair[1])
        world = max(one.linked.trace.world_size or 0 for one in report.ranks)
        given = f"{len(report.ranks)} of " if world > len(report.ranks) else ""
        held = f", held by rank {holder} ({share:.0%} of the path over ranks)" if holder >= 0 else ""
        return [
            f"{format_duration(figures.step)} per step over {given}{max(world, len(report.ranks))} ranks{held}; "
            f"exposed communication {figures.eg_comm:.1%}, imbalance of ranks {figures.eg_imbalance:.1%}.",
            f"Slowest is rank {rank.rank}, {verdict}",
            *lines[1:],
        ]
    return lines


def _state_step(rank: RankReport) -> str:
    """What a step takes, or the whole of a trace that marks none, and what has most of its critical path."""
    seconds = format_duration(rank.median_step.step)
    unit = f"per step{_state_spread(rank)}" if rank.linked.marked else "for the whole trace, which marks no step"
    shares: dict[str, float] = {}
    for what, share in ({} if _find_unknown(rank) else rank.path.by_what).items():
        shares[_HOLDERS.get(what, _KERNELS)] = shares.get(_HOLDERS.get(what, _KERNELS), 0.0) + share
    if not shares:
        return f"{seconds} {unit}"
    holder, share = max(shares.items(), key=lambda pair: pair[1])
    return f"{seconds} {unit}, held by {holder} ({share:.0%} of the critical path)"


def _state_spread(rank: RankReport) -> str:
    """The shortest and the longest step and their mean, where one number does not stand for all."""
    lengths = [step.step for step in rank.steps]
    if max(lengths) < _SPREAD * min(lengths):
        return ""
    mean = sum(lengths) / len(lengths)
    return f" ({format_interval((min(lengths), max(lengths)))}, mean {format_duration(mean)})"


def _state_steps(rank: RankReport) -> str:
    """How many steps that is said of, and the GPU."""
    device = f" on {rank.linked.trace.device_name}" if rank.linked.trace.device_name else ""
    if len(rank.steps) > 1:
        return f"Median of {len(rank.steps)} steps{device}."
    return f"One step{device}." if rank.linked.marked else device and f"It ran{device}."


def _find_unknown(rank: RankReport) -> str:
    """Why it is not known how busy the device was; "" where it is."""
    lost, calls = count_lost_kernels(rank.linked)
    if lost:
        return f"{lost} of {calls} launches have no kernel in it"
    return "" if len(rank.linked.device) else "it has no kernels"


def _state_parts(rank: RankReport) -> str:
    """How busy the device is, and what most of the rest is."""
    if unknown := _find_unknown(rank):
        return f"{unknown}, so how busy the device was is not known"
    step = rank.median_step
    whole = step.step or 1.0
    idle = [(name, getattr(step, name) / whole) for name in PARTS[1:]]
    name, share = max(idle, key=lambda pair: pair[1])
    rest = f", {PART_NAMES[name]} {share:.0%}" if share >= _LEAST_GAIN else ""
    return f"the device is busy {step.active / whole:.0%}{rest}"


def _state_culprit(rank: RankReport) -> str:
    """The op with most of the critical path, and what it would gain."""
    path = rank.path
    ops = [(name, share) for name, share in path.by_op.items() if name]
    if not ops:
        return ""
    name, share = max(ops, key=lambda pair: pair[1])
    if share < min(_LEAST_GAIN, path.by_op.get("", 0.0)):
        return f"Code between ops is {path.by_op['']:.0%} of the path: no op is on record there."
    gain = f"; in half the time it would save {path.faster[name]:.0%} of the step" if name in path.faster else ""
    return f"{shorten_name(name)} has {share:.0%} of the path{gain}."


_TOP = 6  # rows of a table: a page shows the largest, JSON all
_SHORT = 3  # parts of a path that a sentence names
SHOWN_GAIN = 0.001
"""A gain (share of a step) that is less is shown as 0.0 %."""


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
        if gain >= SHOWN_GAIN
    ]
    nothing = [name for name, gain in list(gains.items())[:most] if gain < SHOWN_GAIN]
    return [*lines, f"  nothing by: {', '.join(nothing)}"] if nothing else lines


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


_ATTRIBUTION_TOP = 8  # rows of a table: a page shows the largest, JSON all
_MOST_NAMED = 4
MOST_STEPS = 20
"""Steps that a page shows one by one; JSON has all."""

_WHY = {
    Known.COMMUNICATION: "collectives keep their measured duration",
    Known.HOST_COPY: "copies from and to the host keep theirs, as the host is the trace's own",
    Known.NO_SHAPES: "the trace does not say what the op worked on",
    Known.NO_OP: "launched outside of any op",
    Known.ESTIMATED: "nobody has modelled the op",
}
OVERHEAD_NAMES = {
    "T1": "T1 between ops", "T2": "T2 before launch", "T3": "T3 after launch", "T4": "T4 runtime calls",
    "T5": "T5 between launches", "alone": "T5 ops without launch", KEPT_HOST: "program's own (kept)",
    SET_UP: "set-up and stalls (kept)",
}  # fmt: skip
"""What the types of overhead are called on pages."""


def format_attribution(attribution: Attribution) -> str:
    """Steps with the shares of their error, kernels by family and op, overheads by type and op."""
    own = attribution.host_profile == OWN_HOST
    lines = [
        *format_forecast(attribution),
        *(["  note: this host profile was measured in this very trace"] if attribution.circular else []),
        _format_steps(attribution),
        f"  when it goes on, host and device settled: {format_milliseconds(attribution.steady)} ms per step",
        "",
        "Kernels, per step",
        _format_families(attribution),
        "",
        *_format_ops(attribution),
        *_format_kept(attribution),
    ]
    return "\n".join(lines if own else [*lines, "", *_format_host(attribution)])


def format_forecast(attribution: Attribution) -> list[str]:
    """How far the prediction is off where the trace is of the platform's own GPU, else what is forecast for it; with
    its interval and how much of the kernels was modelled."""
    own = attribution.host_profile == OWN_HOST
    host = f"host time {OWN_HOST}" if own else f"host profile {attribution.host_profile}"
    if attribution.host_scale != 1.0:
        host += f" times {attribution.host_scale:.2f}"
    steps, modelled = attribution.steps, attribution.kernels.modelled
    measured = format_milliseconds(sum(step.measured for step in steps) / len(steps))
    predicted = format_milliseconds(attribution.mean_step)
    on = f"on {attribution.platform} ({host})"
    low, high = map(format_milliseconds, attribution.interval)
    rest = (
        ", the rest is carried over from what it took" if attribution.kernels.carried else ", the rest is as measured"
    )
    same = " with the same host" if own and attribution.is_forecast else ""
    known = f"  90 % interval {low} to {high} ms{same}; {modelled:.0%} of kernel time is modelled"
    known += f", the rest is {rest}" if modelled < 1.0 - _LEAST_MODELLED else ""
    if attribution.is_forecast:
        return [f"Forecast {on}: {predicted} ms per step, measured on {attribution.traced}: {measured} ms", known]
    there = "" if attribution.traced else ", if they ran there: the trace names no GPU"
    if own and modelled < _LEAST_MODELLED:
        return [f"No prediction {on}: next to no kernel says what it worked on, so the step is the measured one{there}"]
    off = f"off by {attribution.gmae:.1%} (geometric mean of {count_of(len(steps), 'step')})"
    return [
        f"Prediction {on}: {predicted} ms per step, measured {measured} ms, {off}{there}",
        known,
        *(_state_clock(attribution) if attribution.traced else []),
    ]


def _state_clock(attribution: Attribution) -> list[str]:
    """That the GPU ran at a low clock, where what follows the clock took far longer and what follows memory did not."""
    products, streams = attribution.kernels.compare_bounds() or (1.0, 1.0)
    if products < _LOW_CLOCK * streams:
        return []
    return [
        f"  kernels that multiply take {products:.1f} times as long as predicted, those that stream memory "
        f"{streams:.1f} times: the GPU's clock was probably low (heat, power limit, or idle just before)"
    ]


def _format_host(attribution: Attribution) -> list[str]:
    return [
        "Host time, per step, the profiler's cost included",
        _format_types(attribution),
        *_format_set_up(attribution),
        "",
        *_format_host_ops(attribution),
    ]


def _format_set_up(attribution: Attribution) -> list[str]:
    """Where the host time arose that is far longer than any overhead."""
    kept = sorted((-m, op) for (kind, op), (m, _) in attribution.sum_host_by_op().items() if kind == SET_UP)
    named = ", ".join(f"{op or 'between ops'} {format_milliseconds(-seconds)} ms" for seconds, op in kept[:_MOST_NAMED])
    return [f"  more than 1 ms at once, which no overhead takes: {named}"] if kept else []


def _format_steps(attribution: Attribution) -> str:
    """The shares of each step's error."""
    header = ("step", "measured ms", "predicted ms", attribution.difference, "= simulation", "+ kernels", "+ overheads")
    rows = [
        (
            str(s.number), format_milliseconds(s.measured), format_milliseconds(s.full), f"{s.error:+.1%}",
            *(f"{share:+.1%}" for share in s.compute_shares().values()),
        )
        for s in attribution.steps[:MOST_STEPS]
    ]  # fmt: skip
    shown = format_table(header, rows, right=range(len(header)))
    rest = len(attribution.steps) - len(rows)
    return f"{shown}\n  {rest} more in the JSON" if rest else shown


def _format_error(pair: Pair) -> str:
    return f"{pair[1] / pair[0] - 1:+.0%}" if pair[0] > 0 else "-"


def _format_signed(seconds: float) -> str:
    return f"{1e3 * seconds:+.2f}"


def _format_families(attribution: Attribution) -> str:
    header = ("family", "measured ms", "predicted ms", attribution.difference, "changes the step by ms")
    rows = [
        (
            name,
            format_milliseconds(pair[0]),
            format_milliseconds(pair[1]),
            _format_error(pair),
            _format_signed(attribution.change_by_family.get(name, 0.0)),
        )
        for name, pair in attribution.sum_by_family().items()
    ]
    return format_table(header, rows, right=(1, 2, 3, 4))


def _format_ops(attribution: Attribution) -> list[str]:
    shown = sorted(attribution.sum_by_op().items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:_ATTRIBUTION_TOP]
    rows = [
        (shorten_name(name, 48), format_milliseconds(p[0]), format_milliseconds(p[1]), _format_error(p))
        for name, p in shown
    ]
    header = ("op (furthest off first)", "measured ms", "predicted ms", attribution.difference)
    return [format_table(header, rows, right=(1, 2, 3))]


def _format_kept(attribution: Attribution) -> list[str]:
    """What was not predicted from shapes, and how much of the device time that is."""
    lines = []
    total = float(attribution.kernels.measured.sum())
    for known, why in _WHY.items():
        mine = np.flatnonzero(attribution.kernels.known == known)
        if not len(mine):
            continue
        seconds = float(attribution.kernels.measured[mine].sum())
        ops = sorted({attribution.kernels.op[kernel] for kernel in mine.tolist()} - {""})
        named = f" ({', '.join(ops[:4])}{', ...' if len(ops) > 4 else ''})" if ops else ""
        share = seconds / total if total else 0.0
        how = "carried to this GPU from what they took" if attribution.kernels.carried else "measured duration"
        why = why if known in (Known.COMMUNICATION, Known.HOST_COPY) else f"{why}: {how}"
        lines.append(f"  {len(mine)} kernels, {share:.0%} of device time: {why}{named}")
    return lines


def _format_types(attribution: Attribution) -> str:
    rows = [
        (
            OVERHEAD_NAMES[kind],
            format_milliseconds(p[0]),
            format_milliseconds(p[1]),
            _format_error(p),
            _format_signed(attribution.change_by_type.get(kind, 0.0)),
        )
        for kind, p in attribution.sum_by_type().items()
        if any(p)
    ]
    header = ("overhead", "measured ms", "pooled ms", attribution.difference, "changes the step by ms")
    return format_table(header, rows, right=(1, 2, 3, 4))


def _format_host_ops(attribution: Attribution) -> list[str]:
    shown = list(attribution.sum_host_by_op().items())[:_ATTRIBUTION_TOP]
    rows = [
        (kind, shorten_name(op, 48) or "-", format_milliseconds(p[0]), format_milliseconds(p[1]), _format_error(p))
        for (kind, op), p in shown
    ]
    header = ("type", "op (furthest off first)", "measured ms", "pooled ms", attribution.difference)
    return [format_table(header, rows, right=(2, 3, 4))]

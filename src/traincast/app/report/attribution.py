"""A traced run predicted and compared, as text."""

from __future__ import annotations

import numpy as np

from traincast.traces.replay.attribution import OWN_HOST, Attribution, Pair
from traincast.traces.replay.host import KEPT as KEPT_HOST
from traincast.traces.replay.host import SET_UP
from traincast.traces.replay.kernels import Known
from traincast.utils.display.text import count_of, format_milliseconds, format_table, shorten_name

_TOP = 8  # rows of a table: a page shows the largest, JSON all
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
    steps = attribution.steps
    measured = format_milliseconds(sum(step.measured for step in steps) / len(steps))
    on = f"on {attribution.platform} ({host})"
    low, high = map(format_milliseconds, attribution.interval)
    rest = "the rest is carried over from what it took" if attribution.kernels.carried else "the rest is as measured"
    known = f"  90 % interval {low} to {high} ms; {attribution.kernels.modelled:.0%} of kernel time is modelled, {rest}"
    if attribution.is_forecast:
        predicted = format_milliseconds(attribution.mean_step)
        return [
            f"Forecast {on}: {predicted} ms per step, measured on {attribution.traced}: {measured} ms",
            known,
        ]
    return [f"Prediction {on}: GMAE {attribution.gmae:.1%} over {count_of(len(steps), 'step')}", known]


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
    shown = sorted(attribution.sum_by_op().items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:_TOP]
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
    shown = list(attribution.sum_host_by_op().items())[:_TOP]
    rows = [
        (kind, shorten_name(op, 48) or "-", format_milliseconds(p[0]), format_milliseconds(p[1]), _format_error(p))
        for (kind, op), p in shown
    ]
    header = ("type", "op (furthest off first)", "measured ms", "pooled ms", attribution.difference)
    return [format_table(header, rows, right=(2, 3, 4))]

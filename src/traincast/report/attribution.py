"""A traced run predicted and compared, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from traincast.display.text import milliseconds, table
from traincast.replay.attribution import Attribution
from traincast.replay.host import KEPT as KEPT_HOST
from traincast.replay.kernels import KEPT, Known
from traincast.traces.link import Linked

_TOP = 8
_WHY = {
    Known.COMMUNICATION: "collectives keep their measured duration",
    Known.NO_SHAPES: "the trace does not say what the op worked on: measured duration",
    Known.NO_OP: "launched outside of any op: measured duration",
    Known.ESTIMATED: "nobody has modelled the op: from its bytes",
}
_TYPES = {
    "T1": "T1 between ops", "T2": "T2 before launch", "T3": "T3 after launch", "T4": "T4 runtime calls",
    "T5": "T5 between launches", "alone": "T5 ops without launch", KEPT_HOST: "data loading (kept)",
}  # fmt: skip
Pair = tuple[float, float]


def gmae(errors: Sequence[float]) -> float:
    """Geometric mean of the absolute relative errors; those below 0.01 % count as that."""
    return math.exp(sum(math.log(max(abs(error), 1e-4)) for error in errors) / len(errors)) if errors else 0.0


def attribution_text(linked: Linked, found: Attribution) -> str:
    """Steps with the shares of their error, kernels by family and op, overheads by type and op."""
    errors = [step.error for step in found.steps]
    host = f"host profile {found.host_profile}"
    if found.host_scale != 1.0:
        host += f" times {found.host_scale:.2f}"
    device = linked.trace.device_name
    measured_on = [f"  measured on {device}: the errors mean something if that is {found.platform}"] if device else []
    lines = [
        f"Prediction on {found.platform} ({host}): GMAE {gmae(errors):.1%} over {len(errors)} steps",
        *measured_on,
        *(["  note: this host profile was measured in this very trace"] if found.circular else []),
        _steps(found),
        "",
        "Kernels, per step",
        _families(found),
        "",
        *_ops(linked, found),
        *_kept(linked, found),
        "",
        "Host time, per step, the profiler's cost included",
        _types(found),
        "",
        *_host_ops(found),
    ]
    return "\n".join(lines)


def _steps(found: Attribution) -> str:
    """The shares of each step's error; where the host profile was scaled, also the error without that."""
    header = ("step", "measured ms", "predicted ms", "error", "= walk", "+ kernels", "+ overheads", "host as shipped")
    columns = len(header) - (found.host_scale == 1.0)
    rows = [
        (
            str(s.number), milliseconds(s.measured), milliseconds(s.full), f"{s.error:+.1%}", f"{s.share('walk'):+.1%}",
            f"{s.share('kernels'):+.1%}", f"{s.share('overheads'):+.1%}", f"{s.unscaled / s.measured - 1:+.1%}",
        )[:columns]
        for s in found.steps
    ]  # fmt: skip
    return table(header[:columns], rows, right=range(columns))


def _error(pair: Pair) -> str:
    return f"{pair[1] / pair[0] - 1:+.0%}" if pair[0] > 0 else "-"


def _signed(seconds: float) -> str:
    return f"{1e3 * seconds:+.2f}"


def by_family(found: Attribution) -> dict[str, Pair]:
    """(measured, predicted) kernel seconds per step by family of the measured kernel, largest first."""
    return _totals(found.kernels.family, found)


def by_op(linked: Linked, found: Attribution) -> dict[str, Pair]:
    """(measured, predicted) kernel seconds per step by the op that was lowered, largest first."""
    return _totals([linked.name(op) if op >= 0 else "(no op)" for op in found.kernels.op.tolist()], found)


def _totals(names: Sequence[str], found: Attribution) -> dict[str, Pair]:
    totals: dict[str, Pair] = {}
    n = len(found.steps)
    for name, m, p in zip(names, found.kernels.measured.tolist(), found.kernels.predicted.tolist(), strict=True):
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + m / n, before[1] + p / n)
    return dict(sorted(totals.items(), key=lambda item: -item[1][0]))


def _families(found: Attribution) -> str:
    header = ("family", "measured ms", "predicted ms", "error", "changes the step by ms")
    rows = [
        (name, milliseconds(pair[0]), milliseconds(pair[1]), _error(pair), _signed(found.by_family.get(name, 0.0)))
        for name, pair in by_family(found).items()
    ]
    return table(header, rows, right=(1, 2, 3, 4))


def _ops(linked: Linked, found: Attribution) -> list[str]:
    ops = by_op(linked, found)
    shown = sorted(ops.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:_TOP]
    rows = [(name[:48], milliseconds(p[0]), milliseconds(p[1]), _error(p)) for name, p in shown]
    return [table(("op (furthest off first)", "measured ms", "predicted ms", "error"), rows, right=(1, 2, 3))]


def _kept(linked: Linked, found: Attribution) -> list[str]:
    """What was not predicted from shapes, and how much of the device time that is."""
    lines = []
    total = float(found.kernels.measured.sum())
    for known, why in _WHY.items():
        mine = np.flatnonzero(found.kernels.known == known)
        if not len(mine):
            continue
        seconds = float(found.kernels.measured[mine].sum())
        ops = sorted({linked.name(op) for op in found.kernels.op[mine].tolist() if op >= 0})
        named = f" ({', '.join(ops[:4])}{', ...' if len(ops) > 4 else ''})" if ops else ""
        share = seconds / total if total else 0.0
        lines.append(f"  {len(mine)} kernels, {share:.0%} of device time: {why}{named}")
    return lines


def by_type(found: Attribution) -> dict[str, Pair]:
    """(measured, pooled) host seconds per step by overhead type."""
    totals: dict[str, Pair] = dict.fromkeys(_TYPES, (0.0, 0.0))
    for (kind, _), (measured, pooled) in found.host.totals().items():
        m, p = totals[kind]
        totals[kind] = (m + measured / len(found.steps), p + pooled / len(found.steps))
    return totals


def _types(found: Attribution) -> str:
    rows = [
        (_TYPES[kind], milliseconds(p[0]), milliseconds(p[1]), _error(p), _signed(found.by_type.get(kind, 0.0)))
        for kind, p in by_type(found).items()
        if any(p)
    ]
    return table(("overhead", "measured ms", "pooled ms", "error", "changes the step by ms"), rows, right=(1, 2, 3, 4))


def _host_ops(found: Attribution) -> list[str]:
    n = len(found.steps)
    shown = list(found.host.totals().items())[:_TOP]
    rows = [
        (kind, op[:48] or "-", milliseconds(m / n), milliseconds(p / n), _error((m, p))) for (kind, op), (m, p) in shown
    ]
    return [table(("type", "op (furthest off first)", "measured ms", "pooled ms", "error"), rows, right=(2, 3, 4))]


def attribution_json(linked: Linked, found: Attribution) -> dict[str, Any]:
    """Everything, in milliseconds per step; shares are relative to the measured step."""

    def pairs(table_of: dict[str, Pair]) -> dict[str, dict[str, float]]:
        return {name: {"measured_ms": 1e3 * m, "predicted_ms": 1e3 * p} for name, (m, p) in table_of.items()}

    n = len(found.steps)
    return {
        "platform": found.platform,
        "host_profile": found.host_profile,
        "host_scale": found.host_scale,
        "host_profile_measured_here": found.circular,
        "framework_version": found.kernels.framework_version,
        "gmae": gmae([step.error for step in found.steps]),
        "steps": [
            {
                "number": s.number, "measured_ms": 1e3 * s.measured, "replayed_ms": 1e3 * s.replayed,
                "with_predicted_kernels_ms": 1e3 * s.with_kernels, "predicted_ms": 1e3 * s.full, "error": s.error,
                "unscaled_ms": 1e3 * s.unscaled,
                "shares": {name: s.share(name) for name in ("walk", "kernels", "overheads")},
            }
            for s in found.steps
        ],
        "kernels_by_family": pairs(by_family(found)),
        "kernels_by_op": pairs(by_op(linked, found)),
        "step_change_by_family_ms": {name: 1e3 * s for name, s in found.by_family.items()},
        "overheads_by_type": pairs(by_type(found)),
        "step_change_by_overhead_ms": {name: 1e3 * s for name, s in found.by_type.items()},
        "overheads_by_op": [
            {"type": kind, "op": op, "measured_ms": 1e3 * m / n, "predicted_ms": 1e3 * p / n}
            for (kind, op), (m, p) in found.host.totals().items()
        ],
        "kernels_by_source": {
            known.name.lower(): {
                "count": int((found.kernels.known == known).sum()),
                "measured_ms": 1e3 * float(found.kernels.measured[found.kernels.known == known].sum()) / n,
                "kept": known in KEPT,
            }
            for known in Known
        },
    }  # fmt: skip

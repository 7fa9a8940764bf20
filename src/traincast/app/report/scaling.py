"""A scaling curve as a table."""

from __future__ import annotations

from traincast.app.report.prediction import format_remarks
from traincast.simulator.prediction.scaling import ScalingCurve
from traincast.simulator.prediction.verdict import state_verdict
from traincast.utils.display.text import count_of, format_bar, format_milliseconds, format_table


def format_scaling(curve: ScalingCurve) -> str:
    """The curve as a table."""
    header = (
        "GPUs",
        "nodes",
        "batch",
        "per GPU",
        "ms per step",
        "90 % interval",
        "samples/s",
        "exposed comm",
        "GB per GPU",
        "efficiency",
        "",
    )
    rows = [
        (
            str(p.gpus),
            str(p.nodes),
            str(p.global_batch),
            str(p.answer.workload.batch_size),
            format_milliseconds(p.answer.iteration),
            " to ".join(format_milliseconds(limit) for limit in p.answer.interval),
            _format_rate(p.throughput),
            f"{format_milliseconds(p.answer.exposed_comm)} ms",
            f"{p.answer.needed_bytes / 1e9:.1f}" + ("" if p.answer.fits else ", too large"),
            f"{p.efficiency:.1%}",
            format_bar(p.efficiency, 20),
        )
        for p in curve.points
    ]
    last = curve.points[-1]
    verdict, trust, *_ = state_verdict(last.answer)
    kept = f"Efficiency {last.efficiency:.1%} of {count_of(curve.points[0].gpus, 'GPU')}"
    lines = [curve.title(), f"{count_of(last.gpus, 'GPU')}: {verdict}", f"{kept}. {trust}"]
    lines += ["", format_table(header, rows, right=range(10))]
    return "\n".join([*lines, *format_remarks(curve.warnings)])


def _format_rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.2f}"

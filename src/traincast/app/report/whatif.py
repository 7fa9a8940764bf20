"""What-ifs, advice, sweeps and sensitivities as pages for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from traincast.planner.what_if.advice import Advice
from traincast.planner.what_if.money import Cost
from traincast.planner.what_if.result import WhatIf, find_bottleneck, summarise_prediction
from traincast.planner.what_if.sensitivity import Sensitivity
from traincast.planner.what_if.sweeps.result import SweepResult, get_row_cost
from traincast.utils.display.text import format_bar, format_milliseconds, format_table

_LEAST_MS = 0.0005  # below, a part is not shown
_MOST_SUGGESTIONS = 20
_MOST_POINTS, _MOST_FAILED = 25, 10
_NO_GAIN = "no edit makes it faster"


def format_whatif(result: WhatIf) -> str:
    """Before and after side by side, what changed, and whether it means anything."""
    first = result.before.headline().split("\n")[0]
    lines = [first, f"what if: {', '.join(result.edits)}", "", _format_steps(result), "", _format_parts(result), ""]
    lines += [*_format_costs(result), _format_bottleneck(result), result.verdict]
    return "\n".join([*lines, *_list_notes(result)])


def _format_steps(result: WhatIf) -> str:
    rows = []
    for name, step in (("before", result.before), ("after", result.after)):
        low, high = (format_milliseconds(limit) for limit in step.interval)
        held = step.needed_bytes / 1e9
        room = step.platform.device.memory_bytes / 1e9
        rows.append((name, format_milliseconds(step.iteration), f"{low} to {high}", f"{held:.2f} of {room:.0f}"))
    least, most = (1e3 * limit for limit in result.change.interval)
    held = (result.after.needed_bytes - result.before.needed_bytes) / 1e9
    change = f"{1e3 * result.change.seconds:+.3f}"
    rows.append(("change", change, f"{least:+.3f} to {most:+.3f}", f"{held:+.2f}"))
    return format_table(("", "ms per step", "90 % interval, ms", "memory, GB"), rows, right=(1, 2, 3))


def _format_parts(result: WhatIf) -> str:
    rows = [
        (name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
        for name, before, after in result.parts()
        if max(before, after) >= _LEAST_MS
    ]
    return format_table(("", "before, ms", "after, ms", "change"), rows, right=(1, 2, 3))


def _format_costs(result: WhatIf) -> list[str]:
    before, after = result.cost_before, result.cost_after
    rows = [
        (name, first, second)
        for (name, first), (_, second) in zip(list_cost_rows(before), list_cost_rows(after), strict=True)
        if first or second
    ]
    return [format_table(("cost", "before", "after"), rows, right=(1, 2)), ""] if rows else []


def list_cost_rows(cost: Cost) -> list[tuple[str, str]]:
    """What is known of a cost, in words; what is not is empty."""
    d = cost.to_dict()

    def shown(key: str, form: str) -> str:
        value = d[key]
        return "" if value is None else form.format(value)

    return [
        ("a step", shown("dollars_per_step", "${:.4g}")),
        ("a million samples", shown("dollars_per_million_samples", "${:,.4g}")),
        ("a million tokens", shown("dollars_per_million_tokens", "${:,.4g}")),
        ("a million samples, at most", shown("most_kwh_per_million_samples", "{:,.4g} kWh") if cost.price else ""),
        ("the run, hours", shown("run_hours", "{:,.4g}")),
        ("the run, GPU hours", shown("run_gpu_hours", "{:,.4g}")),
        ("the run", shown("run_dollars", "${:,.6g}")),
        ("the run, at most", shown("run_most_kwh", "{:,.4g} kWh")),
    ]


def _format_bottleneck(result: WhatIf) -> str:
    (first, share), (second, later) = find_bottleneck(result.before), find_bottleneck(result.after)
    if first == second:
        return f"the bottleneck stays {first}: {share:.0%} of the critical path before, {later:.0%} after"
    return f"the bottleneck moves from {first} ({share:.0%} of the critical path) to {second} ({later:.0%})"


def _list_notes(result: WhatIf) -> Iterable[str]:
    before, after = set(summarise_prediction(result.before)["warnings"]), summarise_prediction(result.after)["warnings"]
    yield from (f"after: {note}" for note in after if note not in before)


def format_advice(advice: Advice) -> str:
    """What limits the step, suggestions as a table, the best three explained."""
    d = advice.to_dict()
    rows = []
    for one in d["suggestions"][:_MOST_SUGGESTIONS]:
        low, high = one["gain_interval"]
        rows.append((
            " + ".join(one["edits"]), f"{one['gain']:.1%}", f"{low:.1%} to {high:.1%}",
            "yes" if one["larger_than_uncertainty"] else "no", f"{one['memory_change_gb']:+.2f}",
            "" if one["fits"] else "does not fit", _format_dollars(one), _format_run(one), one["risk"],
        ))  # fmt: skip
    header = ("edits", "gain a sample", "90 % interval", "certain", "GB", "", "a million samples", "the run", "risk")
    lines = [
        advice.headline().split("\n")[0],
        "",
        _format_filled_table(header, rows, right=(1, 2, 4, 6, 7)) if rows else _NO_GAIN,
    ]
    lines.append("")
    lines += [f"{' + '.join(one['edits'])}: {one['why']}" for one in d["suggestions"] if one["why"]]
    if advice.useless:
        lines.append(f"no gain: {', '.join(advice.useless)}")
    refused = (f"not tried: {text}: {reason.removeprefix(f'edit {text}: ')}" for text, reason in advice.refused.items())
    return "\n".join([*lines, *refused])


def _format_filled_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> str:
    """A table without the columns that are empty in all rows."""
    kept = [column for column in range(len(header)) if any(row[column] for row in rows)]
    chosen = [[row[column] for column in kept] for row in (header, *rows)]
    return format_table(chosen[0], chosen[1:], right=[place for place, column in enumerate(kept) if column in right])


def _format_dollars(suggestion: dict[str, Any]) -> str:
    dollars = suggestion["dollars_per_million_samples"]
    return "" if dollars is None else f"${dollars:,.4g}"


def _format_run(suggestion: dict[str, Any]) -> str:
    """What a whole run costs: dollars where a price is known, else hours."""
    if suggestion["run_dollars"] is not None:
        return f"${suggestion['run_dollars']:,.6g}"
    return "" if suggestion["run_hours"] is None else f"{suggestion['run_hours']:,.4g} h"


def format_sensitivity(result: Sensitivity) -> str:
    """Elasticities and measurements as tables."""
    numbers = [(name, f"{value:+.3f}", format_bar(abs(value))) for name, value in result.elasticities.items()]
    measured = [(name, f"±{left:.1%}") for name, left in result.measurements.items()]
    return "\n".join([
        result.headline(), "", format_table(("1 % more", "% of step", ""), numbers, right=(1,)), "",
        format_table(("if this were measured", "interval left"), measured, right=(1,)),
    ])  # fmt: skip


def format_sweep(result: SweepResult) -> str:
    """The points that nothing beats as a table, and those that failed."""
    paid = any(row["dollars_per_million_samples"] is not None for row in result.pareto)
    rows = [
        (
            *(row[name] for name in result.grid.names), f"{row['iteration_ms']:,.3f}", f"{row['us_per_sample']:,.4g}",
            f"{get_row_cost(row):,.4g}", f"{row['memory_gb']:.2f}",
        )
        for row in result.pareto[:_MOST_POINTS]
    ]  # fmt: skip
    money = "$ a million samples" if paid else "GPU hours per million samples"
    header = (*result.grid.names, "ms per step", "us per sample", money, "GB")
    width = len(result.grid.names)
    lines = [result.headline(), "", format_table(header, rows, right=range(width, width + 4))]
    if len(result.pareto) > _MOST_POINTS:
        lines.append(f"... and {len(result.pareto) - _MOST_POINTS} more")
    for row in result.failed[:_MOST_FAILED]:
        point = ", ".join(f"{name}={row[name]}" for name in result.grid.names)
        lines.append(f"failed: {point}: {row['error']}")
    if len(result.failed) > _MOST_FAILED:
        lines.append(f"... and {len(result.failed) - _MOST_FAILED:,} more that failed")
    return "\n".join(lines)

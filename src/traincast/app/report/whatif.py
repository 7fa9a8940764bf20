"""What-ifs, advice, sweeps and sensitivities as pages for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from traincast.app.report.choices import format_remedies
from traincast.planner.what_if.advice import Advice, Sensitivity
from traincast.planner.what_if.money import Cost
from traincast.planner.what_if.result import WhatIf, find_bottleneck, summarise_prediction
from traincast.planner.what_if.sweeps.result import SweepResult, get_row_cost
from traincast.simulator.prediction.result import state_memory, state_verdict
from traincast.utils.display.text import (
    count_of,
    format_bar,
    format_count,
    format_dollars,
    format_duration,
    format_energy,
    format_milliseconds,
    format_table,
)

_LEAST_MS = 0.0005  # below, a part is not shown
_MOST_SUGGESTIONS = 20
_MOST_POINTS, _MOST_FAILED = 25, 10
_NO_GAIN = "no edit makes it faster"


def format_whatif(result: WhatIf) -> str:
    """Before and after side by side, what changed, and whether it means anything."""
    lines = [*_state_change(result), "", _format_steps(result), "", _format_parts(result), "", *_format_costs(result)]
    return "\n".join([*lines, *_list_notes(result)]).rstrip()


def _state_change(result: WhatIf) -> list[str]:
    """Both times and whether the difference is certain, then the bottleneck, memory and trust."""
    title, size, *_ = result.before.headline().split("\n")
    before, after = (format_duration(step.iteration) for step in (result.before, result.after))
    return [
        f"{title}, {size.partition(':')[0]}; what if: {', '.join(result.edits)}",
        f"{before} per step becomes {after}: {result.verdict}.",
        f"{_format_bottleneck(result)}; then it {state_memory(result.after)}.",
        result.after.trust.sentence,
    ]


def _format_steps(result: WhatIf) -> str:
    rows = []
    for name, step in (("before", result.before), ("after", result.after)):
        low, high = (format_milliseconds(limit) for limit in step.interval)
        held = step.needed_bytes / 1e9
        room = step.platform.device.memory_bytes / 1e9
        rows.append((name, format_milliseconds(step.iteration), f"{low} to {high}", f"{held:.2f} of {room:.0f}"))
    least, most = (1e3 * limit for limit in result.change.interval)
    held = (result.after.needed_bytes - result.before.needed_bytes) / 1e9
    change = f"{_format_change(1e3 * result.change.seconds)}"
    rows.append(("change", change, f"{_format_change(least)} to {_format_change(most)}", f"{held:+.2f}"))
    return format_table(("", "ms per step", "90 % interval, ms", "memory, GB"), rows, right=(1, 2, 3))


def _format_change(ms: float) -> str:
    """Signed milliseconds with as many digits as a time of that length has; nothing where nothing changes."""
    return "" if abs(ms) < _LEAST_MS else f"{'-' if ms < 0 else '+'}{format_milliseconds(1e-3 * abs(ms))}"


def _format_parts(result: WhatIf) -> str:
    rows = [
        (name, format_milliseconds(1e-3 * before), format_milliseconds(1e-3 * after), _format_change(after - before))
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
    if before.price is None and before.run_steps is None:
        return []
    return [format_table(("cost", "before", "after"), rows, right=(1, 2)), ""] if rows else []


def list_cost_rows(cost: Cost) -> list[tuple[str, str]]:
    """What is known of a cost, in words; what is not is empty."""
    d = cost.to_dict()

    def shown(key: str, write: Callable[[float], str]) -> str:
        return "" if d[key] is None else write(d[key])

    return [
        ("per step", shown("dollars_per_step", format_dollars)),
        ("per million samples", shown("dollars_per_million_samples", format_dollars)),
        ("per million tokens", shown("dollars_per_million_tokens", format_dollars)),
        ("energy per million samples, at most", shown("most_kwh_per_million_samples", format_energy)),
        ("the run takes", shown("run_hours", lambda hours: format_duration(3600 * hours))),
        ("the run in GPU hours", shown("run_gpu_hours", format_count)),
        ("the run costs", shown("run_dollars", format_dollars)),
        ("energy of the run, at most", shown("run_most_kwh", format_energy)),
    ]


def _format_bottleneck(result: WhatIf) -> str:
    (first, share), (second, later) = find_bottleneck(result.before), find_bottleneck(result.after)
    if first == second:
        return f"The bottleneck stays {first}: {share:.0%} of the critical path before, {later:.0%} after"
    return f"The bottleneck moves from {first} ({share:.0%} of the critical path) to {second} ({later:.0%})"


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
    header = (
        "edits",
        "gain per sample",
        "90 % interval",
        "certain",
        "GB",
        "",
        "million samples",
        "the run",
        "risk",
    )
    lines = [
        *_state_advice(advice),
        "",
        *(() if advice.before.fits else (format_remedies(advice.remedies), "")),
        _format_filled_table(header, rows, right=(1, 2, 4, 6, 7)) if rows else _NO_GAIN,
    ]
    lines.append("")
    lines += [f"{' + '.join(one['edits'])}: {one['why']}" for one in d["suggestions"] if one["why"]]
    if advice.useless:
        lines.append(f"no gain: {', '.join(advice.useless)}")
    if advice.refused:
        lines.append(f"not for this step (the JSON says why): {', '.join(advice.refused)}")
    return "\n".join(lines)


def _state_advice(advice: Advice) -> list[str]:
    """What the step is now, and the best edit."""
    lines = [advice.before.headline().split("\n")[0], *state_verdict(advice.before)[:2]]
    if not advice.suggestions:
        return [*lines, _NO_GAIN.capitalize() + "."]
    best = advice.suggestions[0]
    sure = "larger than the uncertainty" if best.certain else "within the uncertainty"
    fits = " makes it fit and" if best.answer.after.fits and not advice.before.fits else ""
    change = f"saves {best.gain:.1%}" if best.gain >= 0 else f"costs {-best.gain:.1%} more"
    return [*lines, f"Best: {' + '.join(best.answer.edits)}{fits} {change} of a sample's time, {sure}."]


def _format_filled_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> str:
    """A table without the columns that are empty in all rows."""
    kept = [column for column in range(len(header)) if any(row[column] for row in rows)]
    chosen = [[row[column] for column in kept] for row in (header, *rows)]
    return format_table(chosen[0], chosen[1:], right=[place for place, column in enumerate(kept) if column in right])


def _format_dollars(suggestion: dict[str, Any]) -> str:
    dollars = suggestion["dollars_per_million_samples"]
    return "" if dollars is None else format_dollars(dollars)


def _format_run(suggestion: dict[str, Any]) -> str:
    """What a whole run costs: dollars where a price is known, else hours."""
    if suggestion["run_dollars"] is not None:
        return format_dollars(suggestion["run_dollars"])
    return "" if suggestion["run_hours"] is None else format_duration(3600 * suggestion["run_hours"])


def format_sensitivity(result: Sensitivity) -> str:
    """Elasticities and measurements as tables."""
    numbers = [(name, f"{value:+.3f}", format_bar(abs(value))) for name, value in result.elasticities.items()]
    measured = [(name, f"±{left:.1%}") for name, left in result.measurements.items()]
    return "\n".join([
        result.headline(), "", format_table(("1 % more", "% of step", ""), numbers, right=(1,)), "",
        format_table(("if this were measured", "interval left"), measured, right=(1,)),
    ])  # fmt: skip


def format_sweep(result: SweepResult) -> str:
    """The best point, then every point (of many, those that nothing beats), and those that failed."""
    done = [row for row in result.rows if not row.get("error")]
    best = {id(row) for row in result.pareto}
    shown = done if len(done) <= _MOST_POINTS else result.pareto[:_MOST_POINTS]
    paid = any(row["dollars_per_million_samples"] is not None for row in done)
    rows = [
        (
            *(str(row[name]) for name in result.grid.names), format_milliseconds(1e-3 * row["iteration_ms"]),
            format_duration(1e-6 * row["us_per_sample"]),
            format_dollars(get_row_cost(row)) if paid else f"{get_row_cost(row):.3g}",
            f"{row['memory_gb']:.2f}" + ("" if row["fits"] else ", too large"), "*" if id(row) in best else "",
        )
        for row in sorted(shown, key=lambda row: row["us_per_sample"])
    ]  # fmt: skip
    money = "$ per million samples" if paid else "GPU hours per million samples"
    header = (*result.grid.names, "ms per step", "per sample", money, "GB", "")
    width = len(result.grid.names)
    lines = [*_state_sweep(result), "", format_table(header, rows, right=range(width, width + 4))] if rows else []
    lines += [f"... and {len(done) - len(shown):,} more (a file has them all)"] if len(done) > len(shown) else []
    for row in result.failed[:_MOST_FAILED]:
        point = ", ".join(f"{name}={row[name]}" for name in result.grid.names)
        lines.append(f"failed: {point}: {row['error'].removeprefix('edit ').removeprefix(f'{point}: ')}")
    if len(result.failed) > _MOST_FAILED:
        lines.append(f"... and {len(result.failed) - _MOST_FAILED:,} more that failed")
    return "\n".join(lines or [result.headline()])


def _state_sweep(result: SweepResult) -> list[str]:
    """The fastest and the cheapest point that fit, and how many there are."""
    ran = result.headline().split("\n")[0]
    if not result.pareto:
        return ["No point fits in memory.", ran]
    first, least = result.pareto[0], min(result.pareto, key=get_row_cost)
    named = [", ".join(f"{name}={row[name]}" for name in result.grid.names) for row in (first, least)]
    cheap = "" if least is first else f"Cheapest: {named[1]}. "
    better = count_of(len(result.pareto), "point")
    at = next(number for number, row in enumerate(result.rows) if row is first)
    verdict, trust, *_ = state_verdict(result.predict(at))
    return [
        f"Fastest per sample: {named[0]}: {verdict}",
        f"{cheap}{better} that nothing beats in time, cost and memory (*). {trust}",
        ran,
    ]

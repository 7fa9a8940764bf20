"""Plans as a page for the terminal: the best one, rank by rank, and what it gains over others and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traincast.planner.sharding.result import ScoredPlan, ShardingResult, Task, describe_kind, describe_ranks
from traincast.simulator.collective_calls import format_rank_list
from traincast.simulator.prediction.result import rank_bounds, state_memory
from traincast.utils.display.text import format_milliseconds, format_quantity, format_table

_MOST_TABLES = 40
_MOST_RANKS = 16
_LONGEST = 400  # characters of a command that is printed
_FILE = "plan.json"  # where nobody named one


def format_sharding(result: ShardingResult, written: str | None = None) -> str:
    """The result as a page, with its notes below; `written` is the file that has the best plan."""
    parts = [
        "\n".join(_state_sharding(result)),
        _format_comparison(result),
        _format_ranks(result.best),
        _format_tables(result.task, result.best),
    ]
    predicted = [] if result.scenario is None else [f"to predict this plan: {_choose_command(result, written)}"]
    return "\n".join(["\n\n".join(parts), *predicted, *(f"note: {note}" for note in result.notes)])


def _choose_command(result: ShardingResult, written: str | None) -> str:
    """The command with the plan in it, or in its file where it is long."""
    whole = result.command(result.best, written) or ""
    if len(whole) < _LONGEST:
        return whole
    return f"{result.command(result.best, _FILE)}, once `out` {_FILE} has written it"


def _state_sharding(result: ShardingResult) -> list[str]:
    """How long the best plan takes, what bounds it, whether it fits, what it gains, what it rests on."""
    asked, *rest = result.headline().split("\n")[::2]
    best, step = result.best, result.best.prediction
    bounds = " and ".join(f"{name} ({share:.0%})" for name, share in rank_bounds(step))
    others = [plan for plan in result.plans if plan.name != best.name]
    gain = f", {_compare_times(others[0], best)}" if others else ""
    fits = f"{state_memory(step)} on the fullest GPU" if best.fits else rest.pop()
    whole = "" if result.is_whole_step else "; give `dense` for the whole step"
    return [
        asked,
        f"{result.timed}, bound by {bounds}; {fits}.",
        f"Best plan: {best.name}{gain}; {result.scored:,} plans scored, {len(result.plans)} compared in "
        f"{result.seconds:.1f} s{whole}.",
        step.trust.sentence,
    ]


def _compare_times(other: ScoredPlan, best: ScoredPlan) -> str:
    longer = other.seconds / best.seconds - 1
    return f"{other.name} takes {longer:.1%} longer" if longer >= 0.0005 else f"{other.name} is as fast"


def format_platforms(results: Sequence[ShardingResult]) -> str:
    """The best plans of several platforms side by side, with what was assumed below."""
    rows = []
    for result in results:
        best, step = result.best, result.best.prediction
        low, high = step.interval
        within = f"{format_milliseconds(low)} to {format_milliseconds(high)}"
        rate = f"{result.task.gpus * result.task.batch_size / best.seconds:,.0f}"
        held = f"{step.needed_bytes / 1e9:.1f}" + ("" if best.fits else " (does not fit)")
        kinds = ", ".join(f"{count} {kind}" for kind, count in best.kinds.items())
        rows.append((result.task.platform.key, format_milliseconds(best.seconds), within, rate, held, kinds))
    first = results[0]
    part = "whole step" if first.is_whole_step else "embedding part only (give `dense` for the whole step)"
    head = f"{len(first.task.tables)} tables on {first.task.gpus} GPUs, batch {first.task.batch_size} per GPU: {part}"
    names = ("platform", "ms", "90 % interval", "samples/s", "GB, fullest", "tables")
    notes = dict.fromkeys(note for result in results for note in result.notes)
    table = format_table(names, rows, right=(1, 2, 3, 4))
    alone = "one platform alone shows its plan, what every rank does, and the command that predicts it"
    return "\n".join([head, "", table, alone, *(f"note: {note}" for note in notes)])


def _format_comparison(result: ShardingResult) -> str:
    best = result.best
    rows = [
        (plan.name, format_milliseconds(plan.seconds),
         f"{plan.seconds / best.seconds - 1.0:+.1%}" if plan.seconds != best.seconds else "",
         f"{plan.prediction.needed_bytes / 1e9:.1f}",
         ", ".join(f"{count} {kind}" for kind, count in plan.kinds.items()), plan.explain_slower(best))
        for plan in result.plans
    ]  # fmt: skip
    return format_table(("plan", "ms", "slower", "GB, fullest", "tables", "why"), rows, right=(1, 2, 3))


def _format_ranks(best: ScoredPlan) -> str:
    terms = list(best.terms)
    busiest = np.argsort(-sum(best.terms.values(), np.zeros(best.plan.world_size)), kind="stable")
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in busiest.tolist():
        simulated = best.describe_rank(rank)
        parts = ("compute_ms", "exposed_comm_ms", "idle_ms", "waiting_ms")
        cells = (
            *(format_milliseconds(float(best.terms[term][rank])) for term in terms),
            *(format_milliseconds(1e-3 * simulated[name]) for name in parts),
            f"{best.rank_memory[rank].peak_bytes / 1e9:.1f}",
            f"{best.rank_memory[rank].events.host_bytes / 1e9:.1f}",
        )
        alike.setdefault(cells, []).append(rank)
    shown = list(alike.items())[:_MOST_RANKS]
    rows = [(format_rank_list(sorted(ranks)), *cells) for cells, ranks in shown]
    shown_ranks = sum(len(ranks) for _, ranks in shown)
    header = ("", *terms, "kernels", "exposed communication", "idle", "waiting", "device GB", "host GB")
    more = f"the {shown_ranks} busiest of {best.plan.world_size} ranks; " if shown_ranks < best.plan.world_size else ""
    note = (
        f"{more}ms; terms overlap, kernels + exposed communication + idle make up the step; "
        "idle: the device waits for its host, waiting: for other ranks in collectives"
    )
    return format_table(header, rows, right=range(1, len(header))) + "\n" + note


def _format_tables(task: Task, best: ScoredPlan) -> str:
    order = sorted(range(len(task.tables)), key=lambda i: -task.tables[i].memory_bytes)[:_MOST_TABLES]
    rows = []
    for number in sorted(order):
        placement = best.plan.placements[number]
        everyone = placement.kind.everywhere
        cache = f" {placement.cache_fraction:.0%} cached" if placement.cache_fraction else ""
        rows.append(
            (
                task.tables[number].name,
                format_quantity(task.tables[number].memory_bytes, "B"),
                describe_kind(placement),
                placement.kernel + cache,
                "all" if everyone else describe_ranks(placement),
            )
        )
    more = "" if len(rows) == len(task.tables) else f"\nthe {len(rows)} largest of {len(task.tables)} tables"
    return format_table(("table", "size", "kind", "kernel", "ranks"), rows, right=(1,)) + more

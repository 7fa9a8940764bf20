"""Plans as JSON and as a page for the terminal: the best one, rank by rank, and what it gains over others and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from traincast.display.text import milliseconds, table
from traincast.placement.memory import TERMS as MEMORY_TERMS
from traincast.placement.plan import Plan
from traincast.placement.plan_file import plan_to_json
from traincast.prediction.answers import RankAnswer
from traincast.sharding.search import ScoredPlan, SearchAnswer
from traincast.sharding.task import Task

_MOST_TABLES = 40
_MOST_RANKS = 16


def sharding_json(answer: SearchAnswer) -> dict[str, Any]:
    """The answer as plain data; keys are stable."""
    task, best = answer.task, answer.best
    return {
        "platform": task.platform.key,
        "gpus": task.gpus,
        "batch_size": task.batch_size,
        "tables": len(task.tables),
        "fits": best.memory.fits,
        "missing_gb": best.memory.missing / 1e9,
        "iteration_ms": 1e3 * best.seconds,
        "plan": plan_to_json(best.plan),
        "ranks": _ranks_json(best),
        "compared": [_compared_json(each, best) for each in answer.plans],
        "plans_scored": answer.scored,
        "seconds": answer.seconds,
    }


def _ranks_json(best: ScoredPlan) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "ms": {term: 1e3 * float(own[rank]) for term, own in best.terms.items()},
            "memory_gb": {"device": best.memory.device[rank] / 1e9}
            | {name: float(own) / 1e9 for name, own in zip(MEMORY_TERMS, best.memory.bytes[rank], strict=True)},
            **_walked(best, rank),
        }
        for rank in range(best.plan.world_size)
    ]


def _walked(scored: ScoredPlan, rank: int) -> dict[str, float]:
    """What the full walk says of a rank."""
    own = next(answer for answer in scored.prediction.ranks if rank in answer.ranks)
    return {
        "compute_ms": 1e3 * own.compute,
        "exposed_comm_ms": 1e3 * own.exposed_comm,
        "waiting_ms": 1e3 * own.waiting,
        "idle_ms": 1e3 * own.device_idle,
    }


def _compared_json(each: ScoredPlan, best: ScoredPlan) -> dict[str, Any]:
    return {
        "name": each.name,
        "iteration_ms": 1e3 * each.seconds,
        "slower_percent": 100.0 * (each.seconds / best.seconds - 1.0),
        "fits": each.memory.fits,
        "missing_gb": each.memory.missing / 1e9,
        "most_memory_gb": float(each.memory.device.max()) / 1e9,
        "kinds": dict(_kinds(each.plan)),
        "why": why(each, best),
    }


def why(other: ScoredPlan, best: ScoredPlan) -> str:
    """What makes a plan slower than the best one: a term of a rank, or a device that waits for its host."""
    if not other.memory.fits:
        rank, where = other.memory.fullest
        return f"does not fit: rank {rank} lacks {other.memory.missing / 1e9:.1f} GB{where}"
    mine, theirs = _busiest(best), _busiest(other)
    more = {
        "kernels": theirs.compute - mine.compute,
        "exchanges": theirs.exposed_comm - mine.exposed_comm,
        "idle": theirs.device_idle - mine.device_idle,
    }
    what = max(more, key=lambda name: more[name])
    if more[what] <= 0.005 * best.seconds:
        return ""
    if what == "idle":
        longer = f"devices wait for their hosts {milliseconds(more[what])} ms longer"
        kinds, fewer = len(_kinds(other.plan)), len(_kinds(best.plan))
        if kinds > fewer:
            return f"{longer}: {kinds} kinds of sharding instead of {fewer}, each with its own launches and exchanges"
        return f"{longer}: more launches and exchanges"
    excess = {
        term: float(own.max()) - float(best.terms[term].max() if term in best.terms else 0.0)
        for term, own in other.terms.items()
        if ("exchange" in term or "gradients" in term) == (what == "exchanges")
    }
    term = max(excess, key=lambda name: excess[name], default="")
    if not term or excess[term] <= 0:
        return f"exposed {what} {milliseconds(more[what])} ms longer on rank {theirs.ranks[0]}"
    own = other.terms[term]
    where = "all ranks" if own.max() - own.min() < 0.01 * own.max() else f"rank {int(np.argmax(own))}"
    said = f"{term} {milliseconds(float(own.max()))} ms on {where}, {milliseconds(excess[term])} ms more"
    if 2.0 * excess[term] >= more[what]:
        return said
    return f"{what} {milliseconds(more[what])} ms longer; of that {said}"


def _busiest(scored: ScoredPlan) -> RankAnswer:
    """The rank that computes longest; its compute, exposed exchanges and idle time make up the step."""
    return max(scored.prediction.ranks, key=lambda answer: answer.compute)


def sharding_text(answer: SearchAnswer) -> str:
    """The answer as a page."""
    parts = [_headline(answer), _comparison(answer), _ranks(answer.best), _tables(answer.task, answer.best)]
    return "\n\n".join(parts)


def _headline(answer: SearchAnswer) -> str:
    task, best = answer.task, answer.best
    size = sum(each.memory_bytes for each in task.tables) / 1e9
    lines = [
        f"{len(task.tables)} table{'s' * (len(task.tables) > 1)}, {size:,.1f} GB with optimizer state, "
        f"on {task.gpus} x {task.device.name}, batch {task.batch_size} a GPU",
        f"{milliseconds(best.seconds)} ms a step ({best.name}); "
        f"{answer.scored:,} plans scored, {len(answer.plans)} compared in {answer.seconds:.1f} s",
    ]
    if not best.memory.fits:
        rank, where = best.memory.fullest
        lines.append(f"does not fit: {best.memory.missing / 1e9:.1f} GB{where} missing on the fullest rank, {rank}")
    return "\n".join(lines)


def _kinds(plan: Plan) -> list[tuple[str, int]]:
    names = [
        placement.kind + (" in host memory" if placement.kernel.in_host_memory else "") for placement in plan.placements
    ]
    return Counter(names).most_common()


def _comparison(answer: SearchAnswer) -> str:
    best = answer.best
    rows = [
        (
            each.name,
            milliseconds(each.seconds),
            f"{each.seconds / best.seconds - 1.0:+.1%}" if each.seconds != best.seconds else "",
            f"{each.memory.device.max() / 1e9:.1f}",
            ", ".join(f"{count} {kind}" for kind, count in _kinds(each.plan)),
            why(each, best),
        )
        for each in answer.plans
    ]
    return table(("plan", "ms", "slower", "GB, fullest", "tables", "why"), rows, right=(1, 2, 3))


def _ranks(best: ScoredPlan) -> str:
    terms = list(best.terms)
    busiest = np.argsort(-sum(best.terms.values(), np.zeros(best.plan.world_size)), kind="stable")
    shown = sorted(busiest[:_MOST_RANKS].tolist())
    rows = []
    for rank in shown:
        walked = _walked(best, rank)
        rows.append(
            (
                str(rank),
                *(milliseconds(float(best.terms[term][rank])) for term in terms),
                *(milliseconds(1e-3 * walked[name]) for name in ("compute_ms", "exposed_comm_ms", "idle_ms")),
                milliseconds(1e-3 * walked["waiting_ms"]),
                f"{best.memory.device[rank] / 1e9:.1f}",
                f"{best.memory.host[rank] / 1e9:.1f}",
            )
        )
    header = ("rank", *terms, "kernels", "exposed exchanges", "idle", "waiting", "device GB", "host GB")
    more = f"the {len(shown)} busiest of {best.plan.world_size} ranks; " if len(shown) < best.plan.world_size else ""
    note = (
        f"{more}ms; terms overlap, kernels + exposed exchanges + idle make up the step; "
        "idle: the device waits for its host, waiting: for other ranks in exchanges"
    )
    return table(header, rows, right=range(len(header))) + "\n" + note


def _tables(task: Task, best: ScoredPlan) -> str:
    order = sorted(range(len(task.tables)), key=lambda i: -task.tables[i].memory_bytes)[:_MOST_TABLES]
    rows = []
    for number in sorted(order):
        placement = best.plan.placements[number]
        everyone = placement.kind.everywhere
        cache = f" {placement.cache_fraction:.0%} cached" if placement.cache_fraction else ""
        rows.append(
            (
                task.tables[number].name,
                f"{task.tables[number].memory_bytes / 1e9:.2f}",
                placement.kind,
                placement.kernel + cache,
                "all" if everyone else ", ".join(map(str, placement.ranks)),
            )
        )
    more = "" if len(rows) == len(task.tables) else f"\nthe {len(rows)} largest of {len(task.tables)} tables"
    return table(("table", "GB", "kind", "kernel", "ranks"), rows, right=(1,)) + more

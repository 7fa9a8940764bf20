"""What a search for plans, or a ranking of given ones, answers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from traincast.models.placement.kinds import ShardingKind
from traincast.models.placement.plan import Placement, convert_plan_to_json
from traincast.planner.sharding.scored_plan import ScoredPlan
from traincast.planner.sharding.task import Task
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.settings import format_predict_command
from traincast.utils.display.text import format_duration, format_interval
from traincast.utils.results import Records, Result, drop_nested_values


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ShardingResult(Result):
    """The best plan, all plans it was compared with (best first, itself among them), how many the fast cost has scored,
    the seconds that all took, and notes on what was assumed or left out."""

    task: Task
    best: ScoredPlan
    plans: tuple[ScoredPlan, ...]
    scored: int
    seconds: float
    notes: tuple[str, ...] = ()
    scenario: Scenario | None = None

    @property
    def is_whole_step(self) -> bool:
        """Whether the dense part of the model is in the times, not the embedding tables alone."""
        return self.task.dense is not None

    def command(self, plan: ScoredPlan, file: str | None = None) -> str | None:
        """The command that predicts a plan, in `file` where it was written to one; None where nobody asked by name."""
        if self.scenario is None:
            return None
        text = json.dumps(convert_plan_to_json(plan.plan), separators=(",", ":"))
        return format_predict_command(self.scenario.replace(plan=text if file is None else file))

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data; keys are stable and say their units."""
        task, best = self.task, self.best
        return {
            "platform": task.platform.key,
            "gpus": task.gpus,
            "batch_size": task.batch_size,
            "tables": len(task.tables),
            "fits": best.fits,
            "missing_gb": best.missing / 1e9,
            "part": "step" if self.is_whole_step else "embedding",
            "iteration_ms": 1e3 * best.seconds,
            "command": self.command(best),
            "plan": convert_plan_to_json(best.plan),
            "ranks": [_describe_rank(best, rank) for rank in range(best.plan.world_size)],
            "compared": [
                {**_describe_plan(plan, best), "command": self.command(plan), "prediction": plan.prediction.to_dict()}
                for plan in self.plans
            ],
            "plans_scored": self.scored,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def headline(self) -> str:
        """The tables and where they go, the time of a step or of its embedding part, and whether the best plan fits."""
        task, best = self.task, self.best
        size = sum(table.memory_bytes for table in task.tables) / 1e9
        lines = [
            f"{len(task.tables)} table{'s' * (len(task.tables) > 1)}, {size:,.1f} GB with optimizer state, "
            f"on {task.gpus} x {task.device.name}, batch {task.batch_size} per GPU",
            f"{self.timed}; {best.name}, of {self.scored:,} plans scored and {len(self.plans)} compared in "
            f"{self.seconds:.1f} s",
        ]
        if not best.fits:
            lines.append(f"does not fit: {best.state_missing()}")
        return "\n".join(lines)

    @property
    def timed(self) -> str:
        """The time of the best plan in words, and of what."""
        what = "per step" if self.is_whole_step else "for the embedding part only"
        within = f"(90 % interval {format_interval(self.best.prediction.interval)})"
        return f"{format_duration(self.best.seconds)} {what} {within}"

    def records(self) -> Records:
        """Tables "plans" (those compared), "ranks" (of the best plan: milliseconds by term, GB) and "tables" (where
        the best plan has each)."""
        document = self.to_dict()
        placed = zip(self.task.tables, self.best.plan.placements, strict=True)
        return {
            "plans": [drop_nested_values(plan) for plan in document["compared"]],
            "ranks": [
                drop_nested_values(rank)
                | {f"{term}_ms": ms for term, ms in rank["ms"].items()}
                | {f"{what}_gb": gb for what, gb in rank["memory_gb"].items()}
                for rank in document["ranks"]
            ],
            "tables": [
                {"table": table.name, "gb": table.memory_bytes / 1e9, "kind": describe_kind(placement),
                 "kernel": str(placement.kernel), "ranks": describe_ranks(placement)}
                for table, placement in placed
            ],
        }  # fmt: skip


def describe_kind(placement: Placement) -> str:
    """How a table is cut; one slice of columns is the whole table."""
    whole = placement.kind is ShardingKind.COLUMN_WISE and len(placement.ranks) == 1
    return "whole" if whole or placement.kind is ShardingKind.TABLE_WISE else str(placement.kind)


def describe_ranks(placement: Placement) -> str:
    """The ranks that hold a table in their order, with the number of pieces where a rank has several."""
    pieces = sorted(Counter(placement.ranks).items())
    return ", ".join(f"{rank} ({count} pieces)" if count > 1 else str(rank) for rank, count in pieces)


def _describe_rank(best: ScoredPlan, rank: int) -> dict[str, Any]:
    memory = best.rank_memory[rank]
    held = {"device": memory.peak_bytes, **memory.by_kind, "host": memory.events.host_bytes}
    return {
        "rank": rank,
        "ms": {term: 1e3 * float(seconds[rank]) for term, seconds in best.terms.items()},
        "memory_gb": {name: nbytes / 1e9 for name, nbytes in held.items()},
        **best.walked(rank),
    }


def _describe_plan(plan: ScoredPlan, best: ScoredPlan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "iteration_ms": 1e3 * plan.seconds,
        "slower_percent": 100.0 * (plan.seconds / best.seconds - 1.0),
        "fits": plan.fits,
        "missing_gb": plan.missing / 1e9,
        "most_memory_gb": plan.prediction.needed_bytes / 1e9,
        "kinds": plan.kinds,
        "why": plan.explain_slower(best),
    }

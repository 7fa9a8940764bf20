"""What is to be placed and on what, a plan under the full simulation, what a search answers, and why tables are in host
memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from traincast.hardware.device import Device
from traincast.hardware.platform import Platform
from traincast.hardware.topology import Topology
from traincast.ir.memory import Memory
from traincast.models.embeddings.table import Table, check_tables
from traincast.models.placement.memory import MemoryLimits, check_sizes, compute_shard_bytes
from traincast.models.placement.plan import ComputeKernel, Placement, Plan, ShardingKind, convert_plan_to_json
from traincast.models.sharded_dlrm.step import AnyDense
from traincast.simulator.memory.device_memory import Communicators, compute_headroom
from traincast.simulator.prediction.rank_results import RankResult, list_rank_memory
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.resolved import format_predict_command
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.arrays import FloatArray
from traincast.utils.display.text import format_duration, format_interval, format_milliseconds
from traincast.utils.errors import TraincastError
from traincast.utils.results import Records, Result, drop_nested_values

MAX_GPUS = 1024
"""The most GPUs that are searched for: time and memory of a full simulation grow with their square."""
MAX_BATCH = 1 << 20
"""The largest batch of a GPU: far above any in use, so a larger one is a mistake."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Tables to be placed on `gpus` GPUs of a platform, for `batch_size` samples per GPU.

    `dense` is what every GPU computes besides (None: the step is that of the tables alone).
    """

    tables: tuple[Table, ...]
    platform: Platform
    gpus: int
    batch_size: int
    dense: AnyDense | None = None
    limits: MemoryLimits

    @property
    def device(self) -> Device:
        """One GPU, while the others work too."""
        return self.platform.get_device_when_sharing(self.gpus)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node that take part."""
        return min(self.platform.gpus_per_node, self.gpus)

    @property
    def nodes(self) -> int:
        """Nodes that take part."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def topology(self) -> Topology:
        """The links between the GPUs; a platform that says nothing of them is rejected."""
        if self.platform.topology is None:
            raise TraincastError(
                f"'{self.platform.key}' says nothing of the links between its GPUs; name a node such as dgx-a100"
            )
        return self.platform.topology


def make_task(
    tables: Sequence[Table], platform: Platform, *, gpus: int, batch_size: int, dense: AnyDense | None = None
) -> Task:
    """A task, checked: bad tables, sizes and numbers of GPUs are rejected by name."""
    if not 1 <= gpus <= MAX_GPUS:
        raise TraincastError(f"`gpus={gpus}`; give an integer from 1 to {MAX_GPUS}")
    if not 1 <= batch_size <= MAX_BATCH:
        raise TraincastError(f"`batch_size={batch_size}`; give samples per GPU, from 1 to {MAX_BATCH}")
    if gpus > platform.gpus_per_node and gpus % platform.gpus_per_node:
        raise TraincastError(
            f"`gpus={gpus}` does not fill nodes of {platform.gpus_per_node} GPUs; give a multiple of "
            f"{platform.gpus_per_node}, or fewer than that"
        )
    checked = check_tables(tables)
    for table in checked:
        if table.optimizer == "none":
            raise TraincastError(
                f"table '{table.name}' has optimizer 'none'; plans are made for training steps: give sgd, adagrad, "
                "rowwise_adagrad or adam"
            )
    held = dense.compute_memory_bytes(sum(table.dim for table in checked), batch_size) if dense else 0.0
    device = platform.device
    headroom = compute_headroom(device, Communicators(reducing=1, sending=1))
    limits = MemoryLimits(device=device.memory_bytes, headroom=headroom, dense=held)
    check_sizes(checked, limits, gpus)
    return Task(tables=checked, platform=platform, gpus=gpus, batch_size=batch_size, dense=dense, limits=limits)


_WORTH_SAYING = 0.005  # of a step: what differs by less is not given as a reason
_ALIKE = 0.01  # of the longest: ranks that differ by less spend the same


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredPlan:
    """A plan with its full simulation, its fast cost in seconds, and what each rank spends on what (seconds by term;
    exchanges without waiting). `host_limit` are the bytes of host memory that a rank may use."""

    name: str
    plan: Plan
    prediction: Prediction
    fast_seconds: float
    terms: dict[str, FloatArray]
    host_limit: float

    @property
    def seconds(self) -> float:
        """One step, by the full simulation."""
        return self.prediction.iteration

    @property
    def order(self) -> tuple[float, float]:
        """Better plans come first: those that lack no memory, or least, by seconds."""
        return self.missing, self.seconds

    @cached_property
    def rank_memory(self) -> list[Memory]:
        """What each rank holds at its peak."""
        return list_rank_memory(self.prediction.simulation)

    @cached_property
    def missing(self) -> float:
        """Bytes that the fullest rank lacks, of its device as `fits` counts them or of host memory; 0: all fit."""
        memory = self.prediction.memory
        device = 0.0 if memory.fits else max(memory.required_bytes - memory.limit_bytes, 1.0)
        return max(device, memory.host_bytes - self.host_limit, 0.0)

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return self.missing == 0.0

    def state_missing(self) -> str:
        """What is missing, and on which rank: `rank 3 lacks 1.2 GB of host memory`."""
        memory = self.prediction.memory
        on_host = memory.fits
        held = [one.events.host_bytes if on_host else one.peak_bytes for one in self.rank_memory]
        return f"rank {int(np.argmax(held))} lacks {self.missing / 1e9:.1f} GB{' of host memory' * on_host}"

    @property
    def kinds(self) -> dict[str, int]:
        """How many tables are sharded in which way, the most frequent first."""
        host = " in host memory"
        return dict(Counter(p.kind + host * p.kernel.in_host_memory for p in self.plan.placements).most_common())

    @property
    def busiest(self) -> RankResult:
        """The rank that computes longest; its compute, exposed communication and idle time make up the step."""
        return max(self.prediction.ranks, key=lambda result: result.compute)

    def describe_rank(self, rank: int) -> dict[str, float]:
        """What the full simulation says of a rank, in milliseconds."""
        result = next(result for result in self.prediction.ranks if rank in result.ranks)
        return {
            "compute_ms": 1e3 * result.compute,
            "exposed_comm_ms": 1e3 * result.exposed_comm,
            "waiting_ms": 1e3 * result.waiting,
            "idle_ms": 1e3 * result.device_idle,
        }

    def explain_slower(self, best: ScoredPlan) -> str:
        """What makes the plan slower than the best one: a term of a rank, or a device that waits for its host."""
        if not self.fits:
            return f"does not fit: {self.state_missing()}"
        mine, theirs = self.busiest, best.busiest
        more = {
            "kernels": mine.compute - theirs.compute,
            "exchanges": mine.exposed_comm - theirs.exposed_comm,
            "idle": mine.device_idle - theirs.device_idle,
        }
        what = max(more, key=lambda name: more[name])
        if more[what] <= _WORTH_SAYING * best.seconds:
            return ""
        return self._explain_idle(best, more[what]) if what == "idle" else self._explain_busy(best, what, more[what])

    def _explain_idle(self, best: ScoredPlan, seconds: float) -> str:
        longer = f"devices wait for their hosts {format_milliseconds(seconds)} ms longer"
        kinds, fewer = len(self.kinds), len(best.kinds)
        if kinds > fewer:
            return f"{longer}: {kinds} kinds of sharding instead of {fewer}, each with its own launches and collectives"
        return f"{longer}: more launches and collectives"

    def _explain_busy(self, best: ScoredPlan, what: str, seconds: float) -> str:
        """The term of `what` ("kernels" or "exchanges") that takes most more than in the best plan."""
        excess = {
            term: float(spent.max()) - float(best.terms[term].max() if term in best.terms else 0.0)
            for term, spent in self.terms.items()
            if ("exchange" in term or "gradients" in term) == (what == "exchanges")
        }
        term = max(excess, key=lambda name: excess[name], default="")
        if not term or excess[term] <= 0:
            return f"exposed {what} {format_milliseconds(seconds)} ms longer on rank {self.busiest.ranks[0]}"
        spent = self.terms[term]
        where = "all ranks" if spent.max() - spent.min() < _ALIKE * spent.max() else f"rank {int(np.argmax(spent))}"
        notes = (
            f"{term} {format_milliseconds(float(spent.max()))} ms on {where}, {format_milliseconds(excess[term])} "
            "ms more"
        )
        if 2.0 * excess[term] >= seconds:
            return notes
        return f"{what} {format_milliseconds(seconds)} ms longer; of that {notes}"


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
        stated = f"{size:,.1f}" if size >= 1 else f"{size:.2g}"
        lines = [
            f"{len(task.tables)} table{'s' * (len(task.tables) > 1)}, {stated} GB with optimizer state, "
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
    """The ranks that hold a table in their order, with the number of pieces where a rank has several: `0 to 7`."""
    pieces = sorted(Counter(placement.ranks).items())
    first, last = pieces[0][0], pieces[-1][0]
    if len(placement.ranks) == len(pieces) == last - first + 1 > 2:
        return f"{first} to {last}"
    return ", ".join(f"{rank} ({count} pieces)" if count > 1 else str(rank) for rank, count in pieces)


def _describe_rank(best: ScoredPlan, rank: int) -> dict[str, Any]:
    memory = best.rank_memory[rank]
    held = {"device": memory.peak_bytes, **memory.by_kind, "host": memory.events.host_bytes}
    return {
        "rank": rank,
        "ms": {term: 1e3 * float(seconds[rank]) for term, seconds in best.terms.items()},
        "memory_gb": {name: nbytes / 1e9 for name, nbytes in held.items()},
        **best.describe_rank(rank),
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


_SHOWN = 3  # names of tables


def explain_host_memory(task: Task, best: ScoredPlan, score: Callable[[Plan], ScoredPlan]) -> tuple[str, ...]:
    """One line for tables that the device of their rank has no room for, and one for those that would fit: what the
    step would lose, or lack, with them on the device. `score` simulates a plan. Empty where none is in host memory."""
    plan = best.plan
    there = [number for number, placement in enumerate(plan.placements) if placement.kernel.in_host_memory]
    lacks = {number: _count_missing_bytes(task, best, number) for number in there}
    large, small = ([n for n in there if (lacks[n] > 0.0) is lacking] for lacking in (True, False))
    notes = []
    if large:
        least, most = (pick(lacks[n] for n in large) / 1e9 for pick in (min, max))
        notes.append(
            "in host memory because the devices of their ranks have no room for them: "
            f"{_join_names(task, large)} (each "
            f"alone on the device, {_format_range(least, most)} GB would be missing)"
        )
    if small:
        why = _explain_together(task, best, small, score)
        notes.append(f"in host memory although each would fit: {_join_names(task, small)}; {why}")
    return tuple(notes)


def _explain_together(task: Task, best: ScoredPlan, small: Sequence[int], score: Callable[[Plan], ScoredPlan]) -> str:
    """What keeps tables in host memory of which each would fit on its device."""
    moved = score(_move_to_devices(best.plan, small))
    if not moved.fits:
        return f"all on their devices, {moved.missing / 1e9:.1f} GB would be missing"
    longer = moved.seconds - best.seconds
    if longer > 0.0:
        return (
            f"on their devices the step is {format_milliseconds(longer)} ms longer: they need kernels of their own "
            "there"
        )
    return "on their devices the step is as long"


def _move_to_devices(plan: Plan, numbers: Sequence[int]) -> Plan:
    """The plan with some tables on the devices of their ranks."""
    placements = [
        replace(placement, kernel=ComputeKernel.FUSED, cache_fraction=0.0) if number in numbers else placement
        for number, placement in enumerate(plan.placements)
    ]
    return replace(plan, placements=tuple(placements))


def _count_missing_bytes(task: Task, best: ScoredPlan, number: int) -> float:
    """Bytes that a device lacks for one more table: what its rank holds, and what more the table takes there."""
    table, sizes = task.tables[number], {"batch_size": task.batch_size, "world_size": task.gpus}
    plans, lacking = (_move_to_devices(best.plan, [number]), best.plan), 0.0
    for shard in (one for one in best.plan.make_shards(task.tables) if one.table == number):
        after, before = (compute_shard_bytes(table, plan.placements[number], shard, **sizes)[0] for plan in plans)
        held = best.rank_memory[shard.rank].peak_bytes + after - before
        lacking = max(lacking, held - task.limits.device * (1.0 - task.limits.headroom))
    return lacking


def _join_names(task: Task, numbers: Sequence[int]) -> str:
    names = ", ".join(task.tables[number].name for number in numbers[:_SHOWN])
    return names if len(numbers) <= _SHOWN else f"{names} and {len(numbers) - _SHOWN} more"


def _format_range(least: float, most: float) -> str:
    return f"{least:.1f}" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f} to {most:.1f}"

"""What `traincast.trace` returns: everything that measured traces say, rank by rank and over ranks, and its plain form.

Times are seconds; the plain form says its units in its names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traincast.traces.breakdown import PARTS, RanksBreakdown, StepBreakdown
from traincast.traces.collectives import Collective
from traincast.traces.execution import ExecutionTrace
from traincast.traces.link import Linked
from traincast.traces.overheads.extraction import TYPES, Overheads
from traincast.traces.profiler.tables import ProfileTables, SharedCommunicationRow, convert_rows
from traincast.traces.replay.attribution import Attribution
from traincast.traces.replay.path import PathReport, RanksPath
from traincast.traces.replay.steps import Replay
from traincast.traces.replay.timeline import TimelineInstructions
from traincast.traces.replay.together import RanksReplay, TracedRanksPrediction
from traincast.traces.slowdowns import Slowdown
from traincast.utils.arrays import IntArray
from traincast.utils.display.text import format_milliseconds
from traincast.utils.results import Records, Result, drop_nested_values


@dataclass(frozen=True, eq=False, kw_only=True)
class RankReport:
    """One rank: its linked timeline, its instructions and what follows from them. `joined` is the share of ops that
    were found in the execution trace (None without one), `node` where; `attribution` the prediction on a platform;
    `profile` what a profiler's page shows."""

    rank: int
    linked: Linked
    execution: ExecutionTrace | None
    node: IntArray | None
    instructions: TimelineInstructions
    steps: tuple[StepBreakdown, ...]
    overheads: Overheads
    replay: Replay
    path: PathReport
    attribution: Attribution | None
    collectives: tuple[Collective, ...]
    profile: ProfileTables
    slowdowns: dict[str, Slowdown]
    joined: float | None
    notes: tuple[str, ...]

    @property
    def median_step(self) -> StepBreakdown:
        """The step of median length."""
        order = np.argsort([step.step for step in self.steps], kind="stable")
        return self.steps[int(order[len(order) // 2])]

    def to_dict(self) -> dict[str, Any]:
        """Everything about the rank, in milliseconds and microseconds as the names say."""
        cost = self.overheads.cost
        return {
            "rank": self.rank,
            "file": str(self.linked.trace.path),
            "device": self.linked.trace.device_name,
            "marked": self.linked.marked,
            "notes": list(self.notes),
            "joined_ops": self.joined,
            "steps": [
                {**_step_dict(step), "replayed_ms": 1e3 * replayed.simulated, "replay_error": replayed.error}
                for step, replayed in zip(self.steps, self.replay.steps, strict=True)
            ],
            "overheads_us": {
                kind: {name: d.summarise_us() for name, d in self.overheads.select_type(kind).items()} for kind in TYPES
            },
            "profiler_cost_us": cost
            and {
                "op": 1e-3 * cost.op,
                "call": 1e-3 * cost.call,
                "frame": 1e-3 * cost.frame,
                "step": 1e6 * cost.sum_seconds(self.linked),
            },
            "collectives": [_convert_collective(collective) for collective in self.collectives],
            "beside_collectives": {
                name: {"count": s.count, "ratio": s.ratio, "quartiles": list(s.quartiles)}
                for name, s in self.slowdowns.items()
            },
            "profile": self.profile.to_dict(),
            "critical_path": self.path.to_dict(),
            "prediction": self.attribution
            and {
                **self.attribution.to_dict(),
                "document": self.attribution.make_document(self.linked.trace.path.name, self.notes),
            },
        }

    def list_kernels(self) -> list[dict[str, Any]]:
        """One row per kernel: measured, and predicted where the run was predicted; microseconds."""
        linked, kernels = self.linked, self.attribution.kernels if self.attribution else None
        predicted = dict(zip(kernels.row.tolist(), kernels.predicted.tolist(), strict=True)) if kernels else {}
        rows = []
        for row, family in zip(linked.device.tolist(), linked.find_families(linked.device).tolist(), strict=True):
            scope = linked.find_scope_of_kernel(row)
            entry = {
                "step": int(linked.step[row]),
                "stream": int(linked.events["stream"][row]),
                "name": linked.get_name(row),
                "family": family,
                "op": linked.get_name(scope) if scope >= 0 else "",
                "start_us": 1e-3 * (int(linked.events["start"][row]) - self.replay.origin),
                "length_us": 1e-3 * int(linked.events["duration"][row]),
            }
            if kernels:
                entry["predicted_us"] = 1e6 * predicted[row] if row in predicted else None
            rows.append(entry)
        return rows


def _step_dict(step: StepBreakdown) -> dict[str, Any]:
    return {
        "number": step.number, "iteration_ms": 1e3 * step.step, "device_active_ms": 1e3 * step.active,
        "communication_ms": 1e3 * step.communication, "eg_comm": step.eg_comm, "kernels": step.kernels,
        **{f"{name}_ms": 1e3 * getattr(step, name) for name in PARTS}, "idle_ms": 1e3 * step.idle,
        "idle_evidence": step.evidence,
        "by_family_ms": {name: 1e3 * seconds for name, seconds in step.by_family.items()},
        "by_op_ms": {name: 1e3 * seconds for name, seconds in step.by_op.items()},
    }  # fmt: skip


def _convert_collective(call: Collective) -> dict[str, Any]:
    return {
        "kind": call.kind, "latency_us": 1e6 * call.seconds, "message_bytes": call.message_bytes, "step": call.step,
        "group": call.group, "group_size": call.group_size, "group_ranks": list(call.group_ranks),
        "in_splits": list(call.in_splits), "out_splits": list(call.out_splits),
    }  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class TogetherReport:
    """Several ranks together. `replay` and `path` are None where their collectives could not be matched (`notes` say
    why), `prediction` without a platform too."""

    numbers: tuple[int, ...]
    breakdown: RanksBreakdown
    exchanges: tuple[SharedCommunicationRow, ...]
    replay: RanksReplay | None
    path: RanksPath | None
    prediction: TracedRanksPrediction | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything over ranks, in milliseconds and microseconds as the names say."""
        return {
            "iteration_ms": 1e3 * self.breakdown.step,
            "eg_comm": self.breakdown.eg_comm,
            "eg_imbalance": self.breakdown.eg_imbalance,
            "notes": list(self.notes),
            "exchanges": convert_rows(self.exchanges),
            "replay": self.replay and _replay_dict(self.numbers, self.replay),
            "critical_path": self.path and self.path.to_dict(),
            "prediction": self.prediction and self.prediction.to_dict(self.numbers),
        }


def _replay_dict(numbers: Sequence[int], replay: RanksReplay) -> dict[str, Any]:
    measured, simulated = replay.slowest
    begins = replay.simulation.schedule.begin.tolist()
    return {
        "slowest_measured_ms": 1e3 * measured,
        "slowest_replayed_ms": 1e3 * simulated,
        "clock_spread_us": 1e6 * replay.matches.spread,
        "ranks": [
            {
                "rank": number, "clock_offset_us": 1e-3 * offset, "waited_ms": 1e3 * rank.waited,
                "came_last": rank.last, "begins_ms": 1e3 * begin,
                "steps": [
                    {
                        "number": s.number, "iteration_ms": 1e3 * s.measured, "replayed_ms": 1e3 * s.simulated,
                        "replay_error": s.error, "exposed_comm_ms": 1e3 * m, "replayed_exposed_comm_ms": 1e3 * r,
                    }
                    for s, (m, r) in zip(rank.replay.steps, rank.exposed, strict=True)
                ],
            }
            for number, rank, offset, begin in zip(
                numbers, replay.ranks, replay.matches.offset.tolist(), begins, strict=True
            )
        ],
        "collectives": [
            {
                "kind": match.kind, "group": match.calls[0].group, "ranks": [numbers[m] for m in match.members],
                "message_bytes": max(call.message_bytes for call in match.calls), "transfer_us": 1e6 * match.seconds,
                "latency_us": [1e6 * call.seconds for call in match.calls],
            }
            for match in replay.matches.collectives
        ],
    }  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TraceReport(Result):
    """All ranks that were given, and the figures over them (None for a single rank). Times are seconds."""

    ranks: tuple[RankReport, ...]
    together: TogetherReport | None

    @property
    def is_one_job(self) -> bool:
        """Whether the traces may be ranks of one job: each of them has collectives, even if they contradict."""
        return len(self.ranks) == 1 or all(rank.collectives for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in milliseconds and microseconds as the names say."""
        return {
            "ranks": [rank.to_dict() for rank in self.ranks],
            "together": self.together and self.together.to_dict(),
        }

    def headline(self) -> str:
        """A line per rank: its file, steps, how busy its device was, and how well it replays and is predicted."""
        return "\n".join(_format_headline(rank) for rank in self.ranks)

    def records(self) -> Records:
        """Tables "steps", "kernels", "overheads", "collectives", "critical_path", those of a profiler's page
        ("top_kernels", "rates", "modules", "annotations", "exchanges", "launches", "graphs", "memory", "memory_curve",
        "streams", "queue_curve")
        and, where the run was predicted, "prediction" (one row per step); of several ranks also "together" (one row per
        step, replayed and predicted with all ranks), "shared_exchanges" and "path_over_ranks". Every row but those has
        a `rank`."""
        tables: Records = {}
        for rank in self.ranks:
            entry, label = rank.to_dict(), {"rank": rank.rank}
            rows: Records = {
                "steps": [drop_nested_values(step) for step in entry["steps"]],
                "kernels": rank.list_kernels(),
                "overheads": _make_overhead_rows(entry["overheads_us"]),
                "collectives": entry["collectives"],
                "critical_path": entry["critical_path"]["segments"],
                "prediction": [_step_row(step) for step in (entry["prediction"] or {"steps": []})["steps"]],
                **entry["profile"],
            }
            for name, table in rows.items():
                tables.setdefault(name, []).extend({**label, **row} for row in table)
        return tables | _make_together_records(self.together.to_dict() if self.together else {})


def _format_headline(rank: RankReport) -> str:
    step, count = rank.median_step, len(rank.steps)
    active = step.active / step.step if step.step else 0.0
    furthest = max(abs(replayed.error) for replayed in rank.replay.steps)
    text = (
        f"rank {rank.rank} ({rank.linked.trace.path.name}): {count} step{'s' * (count > 1)}, median "
        f"{format_milliseconds(step.step)} ms, device active {active:.0%}, replayed within {furthest:.1%}"
    )
    attribution = rank.attribution
    if attribution is None:
        return text
    if attribution.is_forecast:
        return f"{text}, forecast for {attribution.platform}: {format_milliseconds(attribution.mean_step)} ms"
    return f"{text}, predicted on {attribution.platform} with GMAE {attribution.gmae:.1%}"


def _make_overhead_rows(overheads: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    return [
        {"type": kind, "op": op, **{key if key == "count" else f"{key}_us": value for key, value in summary.items()}}
        for kind, ops in overheads.items()
        for op, summary in ops.items()
    ]


def _step_row(step: dict[str, Any]) -> dict[str, Any]:
    return {**drop_nested_values(step), **step["shares"]}


def _make_together_records(document: dict[str, Any]) -> Records:
    replay, path, prediction = (document.get(name) or {} for name in ("replay", "critical_path", "prediction"))
    steps = [{"rank": rank["rank"], **step} for rank in replay.get("ranks", ()) for step in rank["steps"]]
    predicted = {(step["rank"], step["number"]): _step_row(step) for step in prediction.get("steps", ())}
    rows = [{**step, **predicted.get((step["rank"], step["number"]), {})} for step in steps]
    return {
        "together": rows,
        "shared_exchanges": document.get("exchanges", []),
        "path_over_ranks": path.get("segments", []),
    }

"""Traced ranks replayed together against what was measured: the simulation over ranks alone, with no model in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from traincast.traces.replay.analysis import analyse_traces
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow, compute_error_row

_FOLDER = "traces/param_dlrm_8xv100"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRank:
    """One rank (or "slowest"): step and exposed communication, measured and replayed, in milliseconds."""

    name: str
    measured_ms: float
    replayed_ms: float
    exposed_measured_ms: float
    exposed_replayed_ms: float

    @property
    def error_percent(self) -> float:
        """Signed error of the step."""
        return 100 * (self.replayed_ms / self.measured_ms - 1)

    @property
    def exposed_error_percent(self) -> float:
        """Signed error of exposed communication."""
        return 100 * (self.exposed_replayed_ms / self.exposed_measured_ms - 1)


def replayed_ranks(data: Path) -> list[ReplayedRank]:
    """The eight ranks of the V100 DLRM replayed together, then the slowest of them by each account."""
    report = analyse_traces([data / _FOLDER])
    replay = report.together and report.together.replay
    if not replay:
        raise TraincastError(f"the ranks of '{data / _FOLDER}' have no collective in common; give its whole folder")
    rows = [
        ReplayedRank(
            name=f"rank {traced.rank}",
            measured_ms=1e3 * step.measured,
            replayed_ms=1e3 * step.simulated,
            exposed_measured_ms=1e3 * measured,
            exposed_replayed_ms=1e3 * replayed,
        )
        for traced, rank in zip(report.ranks, replay.ranks, strict=True)
        for step, (measured, replayed) in zip(rank.replay.steps, rank.exposed, strict=True)
    ]
    slowest = max(rows, key=lambda row: row.measured_ms)
    slowest_replayed = max(rows, key=lambda row: row.replayed_ms)
    return [
        *rows,
        ReplayedRank(
            name="slowest",
            measured_ms=slowest.measured_ms,
            replayed_ms=slowest_replayed.replayed_ms,
            exposed_measured_ms=slowest.exposed_measured_ms,
            exposed_replayed_ms=slowest_replayed.exposed_replayed_ms,
        ),
    ]


def summarise_replayed_ranks(suite: str, data: Path) -> list[ErrorRow]:
    """The replay's error tables: the slowest rank, every rank, and exposed communication of every rank."""
    *ranks, slowest = replayed_ranks(data)
    names = [rank.name for rank in ranks]
    return [
        compute_error_row(suite, "replay, slowest rank", [slowest.replayed_ms], [slowest.measured_ms], ["slowest"]),
        compute_error_row(
            suite, "replay, each rank", [r.replayed_ms for r in ranks], [r.measured_ms for r in ranks], names
        ),
        compute_error_row(
            suite,
            "replay, exposed communication",
            [r.exposed_replayed_ms for r in ranks],
            [r.exposed_measured_ms for r in ranks],
            names,
        ),
    ]

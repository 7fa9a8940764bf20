"""What a sweep answers: rows, those that failed, and those that nothing beats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from traincast.planner.what_if.sweeps.grid import Grid
from traincast.planner.what_if.sweeps.points import Prepared, Sweep, predict_point
from traincast.simulator.prediction.result import Prediction
from traincast.utils.results import Records, Result


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SweepResult(Result):
    """A row for every point, in the order of the grid: its values by axis, then figures or an `error`. `predict` gives
    the whole prediction of a point; a document of few points has them all."""

    name: str
    sweep: Sweep
    grid: Grid
    rows: list[dict[str, Any]]
    resumed: int = 0
    workers: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Points that could not be predicted, with why."""
        return [row for row in self.rows if row.get("error")]

    @property
    def pareto(self) -> list[dict[str, Any]]:
        """Points that fit in memory and that no other beats in time, cost and memory at once; the fastest first."""
        return find_pareto_rows([row for row in self.rows if not row.get("error") and row["fits"]])

    def predict(self, number: int) -> Prediction:
        """The prediction that a row (from 0) has the figures of."""
        return predict_point(Prepared(sweep=self.sweep), tuple(self.grid)[number])

    def _add_documents(self) -> list[dict[str, Any]]:
        """The rows, of few points each with its prediction as one document."""
        if len(self.rows) > _MOST_DOCUMENTS:
            return self.rows if len(self.rows) <= _MOST_ROWS else []
        return [
            {**row, "prediction": None if row.get("error") else self.predict(number).to_dict()}
            for number, row in enumerate(self.rows)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data; rows of at most 64 points have their `prediction`."""
        return {
            "workload": self.name,
            "axes": {name: list(values) for name, values in self.grid.axes},
            "points": len(self.rows),
            "failed": len(self.failed),
            "resumed": self.resumed,
            "workers": self.workers,
            "seconds": self.seconds,
            "pareto": self.pareto,
            "failures": self.failed[:_MOST_FAILURES],
            "rows": self._add_documents(),
            "notes": list(self.notes),
        }

    def headline(self) -> str:
        """How many points, how long, and how many failed."""
        again = f", {self.resumed:,} of them from before" if self.resumed else ""
        failed = f"; {len(self.failed):,} could not be predicted" if self.failed else ""
        ran = f"in {self.seconds:.1f} s ({self.workers}{again}){failed}"
        return (
            f"{self.name}: {_count_points(len(self.rows))} {ran}\n"
            f"{_count_points(len(self.pareto))} that no other beats in time of a sample, cost and memory at once"
        )

    def records(self) -> Records:
        """Tables "points" and "pareto"."""
        return {"points": self.rows, "pareto": self.pareto}


def _count_points(number: int) -> str:
    return f"{number:,} point{'s' * (number != 1)}"


_MOST_FAILURES = 100
_MOST_DOCUMENTS = 64
_MOST_ROWS = 10_000  # in a document; the file has them all


def get_row_cost(row: dict[str, Any]) -> float:
    """Dollars of a million samples, or GPU hours where there is no price."""
    dollars = row["dollars_per_million_samples"]
    return float(row["gpu_hours_per_million_samples"] if dollars is None else dollars)


def find_pareto_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that no other beats: none is at least as good in all goals and better in one."""
    ranked = sorted(rows, key=lambda row: (row["us_per_sample"], get_row_cost(row), row["memory_gb"]))
    kept: list[tuple[float, float, dict[str, Any]]] = []
    for row in ranked:
        # who comes earlier is at least as fast, so it beats this one if it is also no dearer and no larger
        price, held = get_row_cost(row), row["memory_gb"]
        if not any(other <= price and size <= held for other, size, _ in kept):
            kept.append((price, held, row))
    return [row for _, _, row in kept]

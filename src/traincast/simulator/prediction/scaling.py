"""What a scaling curve is: one step predicted on several numbers of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from traincast.simulator.prediction.result import Prediction
from traincast.utils.display.text import count_of, format_milliseconds
from traincast.utils.results import Records, Result, drop_nested_values

SCALINGS = ("weak", "strong")
"""What stays the same along a curve: the batch of a GPU, or that of all GPUs together."""


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One number of GPUs. `throughput` is samples per second of all of them; `efficiency` is the throughput of a GPU
    relative to that of a GPU at the first point of the curve."""

    gpus: int
    nodes: int
    global_batch: int
    throughput: float
    efficiency: float
    answer: Prediction

    def to_dict(self) -> dict[str, Any]:
        """The point as plain data; keys say their units."""
        result = self.answer
        return {
            "gpus": self.gpus,
            "nodes": self.nodes,
            "batch_size": result.workload.batch_size,
            "global_batch": self.global_batch,
            "iteration_ms": 1e3 * result.iteration,
            "interval_ms": [1e3 * limit for limit in result.interval],
            "throughput_samples_per_s": self.throughput,
            "efficiency": self.efficiency,
            "exposed_comm_ms": 1e3 * result.exposed_comm,
            "device_active_ms": 1e3 * result.device_active,
            "peak_memory_gb": result.memory.peak_bytes / 1e9,
        }


@dataclass(frozen=True, slots=True, repr=False)
class ScalingCurve(Result):
    """Predictions of one step over numbers of GPUs: `kind` is "weak" (the batch of a GPU stays) or "strong" (the
    batch of all GPUs together stays)."""

    kind: str
    points: tuple[ScalingPoint, ...]

    @property
    def warnings(self) -> list[str]:
        """Every warning of the points once; of those that differ in numbers only, the last."""
        notes = {re.sub(r"[\d.]+", "#", text): text for point in self.points for text in point.answer.warnings}
        return list(notes.values())

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain data: one row per number of GPUs; keys are stable and say their units."""
        first = self.points[0].answer
        return {
            "workload": first.workload.name,
            "platform": first.platform.key,
            "device": first.platform.device.name,
            "mode": first.workload.mode,
            "seq_len": first.workload.seq_len or None,
            "scaling": self.kind,
            "rows": [point.to_dict() for point in self.points],
            "warnings": self.warnings,
        }

    def title(self) -> str:
        """Model, device and which batch stays the same."""
        first = self.points[0].answer
        fixed = "batch of a GPU fixed" if self.kind == "weak" else "batch of all GPUs together fixed"
        sequence = f", {first.workload.seq_len} tokens" if first.workload.seq_len else ""
        model = f"{first.workload.name} ({first.workload.mode}) on {first.platform.device.name}{sequence}"
        return f"{model}: {self.kind} scaling, {fixed}"

    def chart(self) -> str:
        """The curve with its 90 % interval."""
        from traincast.utils.display.html import format_html_curve

        points = []
        for point in self.points:
            low, high = point.answer.interval
            points.append((str(point.gpus), 1e3 * point.answer.iteration, 1e3 * low, 1e3 * high))
        return format_html_curve(points, label="ms per step over GPUs; the band is the 90 % interval")

    def headline(self) -> str:
        """The title, then one line per number of GPUs."""
        points = [
            f"{count_of(point.gpus, 'GPU')}: {format_milliseconds(point.answer.iteration)} ms per step, efficiency "
            f"{point.efficiency:.1%}"
            for point in self.points
        ]
        return "\n".join([self.title(), *points])

    def records(self) -> Records:
        """ "points": one row per number of GPUs."""
        return {"points": [drop_nested_values(point.to_dict()) for point in self.points]}

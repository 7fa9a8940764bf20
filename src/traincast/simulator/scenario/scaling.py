"""Scaling curves: the same step on one number of GPUs after another, and how much of them is used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved, resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.display.text import count_of, format_milliseconds
from traincast.utils.errors import TraincastError
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


MAX_COUNTS = 64  # a curve of more points is a mistake in the command rather than a wish


def predict_scaling(scenario: Scenario, gpus: Sequence[int], scaling: str = "weak") -> ScalingCurve:
    """Predicts a step on every number of GPUs. The batch size of the scenario is that of one GPU when scaling is weak,
    and that of all GPUs together when it is strong; its own number of GPUs is not used."""
    if scaling not in SCALINGS:
        raise TraincastError(f"scaling '{scaling}' is unknown; choose {' or '.join(SCALINGS)}")
    counts = _check_gpu_counts(gpus)
    resolved = resolve(scenario.replace(gpus=None))
    _check_curve(resolved, scaling)
    laid_out = resolved.kind == "parallel"
    whole = _get_whole_batch(resolved)
    points: list[ScalingPoint] = []
    for count in counts:
        sizes = _size_layout if laid_out else _size_step
        result = predict(resolved.changed(gpus=count, **sizes(resolved.scenario, whole, count, scaling)))
        figures = result.parallel
        samples = count * result.workload.batch_size if figures is None else figures.layout.global_batch
        throughput = samples / result.iteration
        alone = points[0].throughput / points[0].gpus if points else throughput / count
        nodes = -(-count // result.platform.gpus_per_node)
        points.append(ScalingPoint(count, nodes, samples, throughput, throughput / count / alone, result))
    return ScalingCurve(scaling, tuple(points))


def _size_step(scenario: Scenario, whole: int, gpus: int, scaling: str) -> dict[str, int | None]:
    """The batch of a GPU."""
    return {"batch_size": _get_batch_per_gpu(whole, gpus, scaling)}


def _size_layout(scenario: Scenario, whole: int, gpus: int, scaling: str) -> dict[str, int | None]:
    """The batches of a Transformer that is laid out: micro-batches stay, and of a strong curve so does the step's
    number of samples; layouts check that they divide."""
    if scaling == "weak":
        return {}
    return {"batch_size": None, "micro_batch": scenario.micro_batch or 1, "global_batch": whole}


def _check_curve(resolved: Resolved, scaling: str) -> None:
    """Rejects steps that have no curve."""
    if resolved.source == "tables":
        raise TraincastError(
            f"{resolved.name} is laid out for one number of GPUs at a time; give one number of `gpus`, or 'traincast "
            "sweep' with `gpus` varied"
        )
    passes: tuple[str, ...] = ("micro_batch", "global_batch")
    if resolved.kind == "parallel":
        passes = () if scaling == "strong" else ("global_batch",)
    for name in ("skew_ms", "jitter", "loader_ms", "pageable", "plan", *passes):
        if getattr(resolved.scenario, name):
            raise TraincastError(f"`{name}` is for one prediction; give one number of `gpus`")


def _get_whole_batch(resolved: Resolved) -> int:
    """The batch size asked for, or the workload's own; one made for several GPUs is rejected."""
    scenario = resolved.scenario
    if resolved.kind == "parallel":
        return scenario.global_batch or scenario.samples_per_pass or 1
    if scenario.trains_eagerly and resolved.source == "dlrm":
        return resolved.of_dlrm().batch_size if scenario.batch_size is None else scenario.batch_size
    workload = load_single_gpu_step(scenario, resolved.source)
    if len(workload.ranks) > 1:
        raise TraincastError(
            f"workload '{workload.name}' was made for {len(workload.ranks)} GPUs; a curve needs one made for one GPU"
        )
    return workload.batch_size


def _check_gpu_counts(gpus: Sequence[int]) -> list[int]:
    counts = sorted(set(gpus))
    if not counts or counts[0] < 1:
        raise TraincastError(f"numbers of GPUs must be 1 or more, not {', '.join(map(str, gpus))}")
    if len(counts) > MAX_COUNTS:
        raise TraincastError(f"{len(counts)} numbers of GPUs are too many; give at most {MAX_COUNTS}")
    return counts


def _get_batch_per_gpu(batch: int, gpus: int, scaling: str) -> int:
    if scaling == "weak":
        return batch
    if batch % gpus:
        raise TraincastError(
            f"a batch of {batch} cannot be divided among {gpus} GPUs (strong scaling); give a `batch_size` that "
            f"is a multiple of {gpus}"
        )
    return batch // gpus

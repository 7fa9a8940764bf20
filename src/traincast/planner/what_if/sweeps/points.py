"""One point of a sweep: its edits applied and its step predicted, as a row of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from traincast.planner.what_if.edits.registry import apply_edits, parse_edits
from traincast.planner.what_if.money import Cost, Prices, compute_cost
from traincast.planner.what_if.sweeps.grid import list_edits_at
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.sizes import SizeResult, predict_sizes
from traincast.simulator.scenario.predict import load_step, make_loader, predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError

FIGURES = (
    "iteration_ms", "low_ms", "high_ms", "us_per_sample", "samples_per_s", "gpu_hours_per_million_samples",
    "dollars_per_million_samples", "memory_gb", "fits", "device_active_ms", "device_idle_ms", "exposed_comm_ms",
)  # fmt: skip
"""What is known of a point that could be predicted; the rows of the others have an `error`."""
_SIZES = ("batch-size", "seq-len")
_MOST_VARIANTS = 64
_MOST_TOGETHER = 16
_FAILURES = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, MemoryError)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The step that is varied, along which axes, at which price by platform ("": every other one)."""

    resolved: Resolved
    names: tuple[str, ...]
    prices: dict[str, float] = field(default_factory=dict)


@dataclass
class Prepared:
    """What a worker keeps between points: steps with all edits but those of sizes."""

    sweep: Sweep
    variants: dict[tuple[str, ...], Resolved] = field(default_factory=dict)


Group = tuple[tuple[str, ...], ...]
"""Points that differ in their sizes only."""


def group_points(names: tuple[str, ...], points: Sequence[tuple[str, ...]]) -> list[tuple[int, int]]:
    """First and end of every run of neighbours that differ in their sizes only, none too long."""
    fixed = [i for i, name in enumerate(names) if name not in _SIZES]
    runs, start = [], 0
    for end in range(1, len(points) + 1):
        same = end < len(points) and all(points[end][i] == points[start][i] for i in fixed)
        if not same or end - start == _MOST_TOGETHER:
            runs.append((start, end))
            start = end
    return runs


def predict_group(worker: Prepared, group: Group) -> list[dict[str, Any]]:
    """The rows of a group: predicted side by side where that is possible, else one by one."""
    if len(group) > 1:
        with suppress(*_FAILURES):
            return _predict_together(worker, group)
    return [_make_point_row(worker, values) for values in group]


def _predict_together(worker: Prepared, group: Group) -> list[dict[str, Any]]:
    variants = [_resolve_point(worker, list_edits_at(worker.sweep.names, values)) for values in group]
    first = variants[0]
    if first.kind == "parallel" or first.gpus > 1 or make_loader(first.scenario) is not None:
        raise TraincastError("only steps of one GPU are predicted together")
    price = _find_prices(worker.sweep.prices, first.platform.key)
    limit = first.platform.device.memory_bytes
    rows = []
    for result, samples in _predict_sizes(variants):
        cost = Cost(
            gpus=1, seconds=result.iteration, samples=samples, tokens=0, price=price.per_gpu_hour, watts=None,
            run_steps=None,
        )  # fmt: skip
        idle = max(0.0, result.iteration - result.device_active)
        held = result.peak_bytes
        rows.append(_make_row(cost, result.interval, (result.device_active, idle, 0.0), held, fits=held <= limit))
    return rows


def _predict_sizes(variants: Sequence[Resolved]) -> list[tuple[SizeResult, int]]:
    """What `predicted` says of steps that differ in batch size or sequence length only, all of one GPU and without a
    data loader, and the samples of each step."""
    steps = [load_step(resolved)[0] for resolved in variants]
    first = variants[0]
    results = predict_sizes(
        steps,
        first.platform,
        tf32=first.scenario.dtype == "tf32",
        host=first.host,
        roofline_only=first.scenario.roofline_only,
        op_speed=first.op_speed,
    )
    return [(result, step.samples) for result, step in zip(results, steps, strict=True)]


def predict_point(worker: Prepared, values: tuple[str, ...]) -> Prediction:
    """The prediction of a point."""
    return predict(_resolve_point(worker, list_edits_at(worker.sweep.names, values)))


def _make_point_row(worker: Prepared, values: tuple[str, ...]) -> dict[str, Any]:
    """The row of a point: its figures, or an error."""
    try:
        result = predict_point(worker, values)
        return make_figures(result, worker.sweep.prices)
    except TraincastError as error:
        return {"error": str(error)}
    except _FAILURES as error:
        return {"error": f"internal error, please report it: {type(error).__name__}: {error}"}


def _resolve_point(worker: Prepared, texts: tuple[str, ...]) -> Resolved:
    """The step of a point; what all batch sizes have in common is edited once."""
    sizes = tuple(text for text in texts if text.partition("=")[0] in _SIZES)
    others = tuple(text for text in texts if text not in sizes)
    if others not in worker.variants:
        if len(worker.variants) >= _MOST_VARIANTS:
            worker.variants.pop(next(iter(worker.variants)))
        parse_edits(texts)
        worker.variants[others] = apply_edits(worker.sweep.resolved, parse_edits(others))
    return apply_edits(worker.variants[others], parse_edits(sizes))


def _find_prices(prices: dict[str, float], key: str) -> Prices:
    """The price of a point; where others have one, a point without would be ranked by another measure."""
    if prices and key not in prices and "" not in prices:
        raise TraincastError(f"`price` has none for {key}; give one for every platform of the sweep")
    return Prices(per_gpu_hour=prices.get(key, prices.get("")))


def make_figures(result: Prediction, prices: dict[str, float]) -> dict[str, Any]:
    """The figures of a predicted point."""
    cost = compute_cost(result, _find_prices(prices, result.platform.key))
    idle = max(0.0, result.iteration - result.device_active)
    parts = (result.device_active, idle, result.exposed_comm)
    return _make_row(cost, result.interval, parts, result.needed_bytes, fits=result.fits)


def _make_row(
    cost: Cost, interval: tuple[float, float], parts: tuple[float, float, float], held: float, *, fits: bool
) -> dict[str, Any]:
    money = cost.to_dict()
    active, idle, comm = parts
    return {
        "iteration_ms": 1e3 * cost.seconds,
        "low_ms": 1e3 * interval[0],
        "high_ms": 1e3 * interval[1],
        "us_per_sample": 1e6 * cost.seconds / cost.samples,
        "samples_per_s": cost.samples / cost.seconds,
        "gpu_hours_per_million_samples": money["gpu_hours_per_million_samples"],
        "dollars_per_million_samples": money["dollars_per_million_samples"],
        "memory_gb": held / 1e9,
        "fits": fits,
        "device_active_ms": 1e3 * active,
        "device_idle_ms": 1e3 * idle,
        "exposed_comm_ms": 1e3 * comm,
    }

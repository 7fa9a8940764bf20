"""The points of a sweep: axes of values, and each of their combinations predicted as a row of plain values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from traincast.planner.what_if.edits.registry import apply_edits, parse_edits
from traincast.planner.what_if.money import Cost, Prices, compute_cost
from traincast.simulator.prediction.prediction import SizeResult, predict_sizes
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.predict import load_step, make_loader, predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import list_scenario_fields
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value

MOST_POINTS = 1_000_000
MOST_VALUES = 100_000
APPLY, NONE = "apply", "none"
"""The axis of edits without values, and its value for none of them; `a+b` are two together."""
_MOST_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Axes by name (an edit, or `apply`), each with its values as texts, in the order in which points run: the last
    axis changes fastest."""

    axes: tuple[tuple[str, tuple[str, ...]], ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise TraincastError("a sweep needs something to vary, such as batch-size=512,1024,2048")
        if self.points > MOST_POINTS:
            sizes = [len(values) for _, values in self.axes]
            room = max(n for n in range(1, max(sizes)) if math.prod(min(size, n) for size in sizes) <= MOST_POINTS)
            longer = " and ".join(f"'{name}'" for name, values in self.axes if len(values) > room)
            raise TraincastError(
                f"a sweep of {self.points:,} points is too large: at most {MOST_POINTS:,}; give at most {room:,} "
                f"values of {longer}"
            )

    @property
    def points(self) -> int:
        """How many points there are."""
        return math.prod(len(values) for _, values in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(name for name, _ in self.axes)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return product(*(values for _, values in self.axes))


def list_edits_at(names: Sequence[str], values: Sequence[str]) -> tuple[str, ...]:
    """The edits of a point."""
    texts: list[str] = []
    for name, value in zip(names, values, strict=True):
        if name == APPLY:
            texts += [text for text in value.split("+") if text != NONE]
        else:
            texts.append(f"{name}={value}")
    return tuple(texts)


def make_grid(varied: Mapping[str, Sequence[str]]) -> Grid:
    """The grid of axes as they were given, each value of each checked once; batch sizes go fastest, platforms slowest,
    since neighbours share most work then."""
    order = {"on": -3, "gpus": -2, APPLY: -1, "batch-size": 2, "seq-len": 1}
    axes = []
    for name in sorted(varied, key=lambda name: order.get(name, 0)):
        values = tuple(dict.fromkeys(value for text in varied[name] for value in expand_values(name, text)))
        if not values:
            raise TraincastError(f"axis '{name}' has no values; give some, such as {name}=1,2,4")
        for value in values if name == APPLY else values[:1]:
            parse_edits(list_edits_at([name], [value]))
        axes.append((name, values))
    grid = Grid(axes=tuple(axes))
    parse_edits(list_edits_at(grid.names, [values[-1] for _, values in axes]))
    return grid


def expand_values(name: str, text: str) -> list[str]:
    """The values of `512,1024`, of a range `256:4096:x2` or `100:1000:100`.

    >>> expanded("batch-size", "256:2048:x2"), expanded("gpus", "1:7:3"), expanded("on", "v100,h100")
    (['256', '512', '1024', '2048'], ['1', '4', '7'], ['v100', 'h100'])
    """
    values: list[str] = []
    for part in str(text).split(","):
        blocks = part.strip().split(":")
        if len(blocks) == 3 and all(block.removeprefix("x").isdecimal() for block in blocks):
            values += _expand_range(name, blocks)
        elif part.strip():
            values.append(part.strip())
    if len(values) > MOST_VALUES:
        raise TraincastError(f"axis '{name}' has {len(values):,} values; give at most {MOST_VALUES:,}")
    return values


def _expand_range(name: str, blocks: Sequence[str]) -> list[str]:
    grows = blocks[2].startswith("x")
    plain = all(len(block) <= _MOST_DIGITS and block.isascii() for block in blocks)
    first, last, step = (int(block.removeprefix("x")) if plain else 0 for block in blocks)
    if first < 1 or last < first or step < (2 if grows else 1) or "x" in blocks[0] + blocks[1]:
        raise TraincastError(
            f"{name}={shorten_value(':'.join(blocks))} is no range; write first:last:step, or first:last:x2 to double"
        )
    if grows:
        return [str(value) for n in range(64) if (value := first * step**n) <= last]
    count = (last - first) // step + 1
    if count > MOST_VALUES:
        wider = -(-(last - first + 1) // MOST_VALUES)
        raise TraincastError(
            f"axis '{name}' has {count:,} values; give at most {MOST_VALUES:,}, such as {first}:{last}:{wider}"
        )
    return [str(value) for value in range(first, last + 1, step)]


def read_varied_values(vary: Any, where: str) -> dict[str, list[str]]:
    """The axes of a sweep's file: values by edit, each as a text."""
    if vary is None:
        return {}
    if not isinstance(vary, Mapping):
        raise TraincastError(f"{where}: 'vary' has values by edit, such as `batch-size: [512, 1024]`")
    return {str(name): _read_listed(where, str(name), values) for name, values in vary.items()}


def check_options(options: Any) -> dict[str, Any]:
    """Fields of the scenario that stand under `options` in a sweep's file."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TraincastError("'options' are fields of the scenario by name, such as dtype: tf32")
    known = list_scenario_fields()
    for name in options:
        if name not in known:
            raise make_unknown_error("option", str(name), known, f"'options' may have {', '.join(known)}.")
    return dict(options)


def _read_listed(path: str, name: str, values: Any) -> list[str]:
    listed = values if isinstance(values, list) else [values]
    for value in listed:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise TraincastError(f"{path}: '{name}' must have numbers or names as values, not {shorten_value(value)}")
    return [format_value(value) for value in listed]


def format_value(value: str | int | float) -> str:
    """A value as an edit takes it: integers without a fraction, as YAML and Python have 1e3.

    >>> value_text(1e3), value_text(0.5), value_text("x2")
    ('1000', '0.5', 'x2')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


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
    rows = []
    for result, samples in _predict_sizes(variants):
        cost = Cost(
            gpus=1, seconds=result.iteration, samples=samples, tokens=0, price=price.find(first.platform), watts=None,
            run_steps=None,
        )  # fmt: skip
        idle = max(0.0, result.iteration - result.device_active)
        held, parts = result.memory.used_bytes, (result.device_active, idle, 0.0)
        rows.append(_make_row(cost, result.interval, parts, held, fits=result.memory.fits))
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

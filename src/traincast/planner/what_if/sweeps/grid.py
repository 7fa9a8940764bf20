"""What a sweep goes through: axes of values, whose product are its points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from traincast.planner.what_if.edits.registry import parse_edits
from traincast.simulator.scenario.fields import list_scenario_fields
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

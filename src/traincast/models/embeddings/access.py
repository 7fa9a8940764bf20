"""Access distributions: which rows of a table lookups access, by Zipf's law, histogram or list; rows drawn from
them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, isfinite

import numpy as np

from traincast.models.embeddings.reuse import ReuseHistogram, RowClasses
from traincast.utils.arrays import FloatArray, IntArray
from traincast.utils.errors import TraincastError

_SINGLE = 256  # ranks that are a class of their own
_RATIO = 1.02  # last rank over first of the other classes


def make_zipf_classes(rows: int, exponent: float) -> RowClasses:
    """Classes of a table whose r-th most popular row is accessed in proportion to r ** -exponent."""
    edges = _choose_edges(rows)
    weight = _compute_power_sums(edges, exponent)
    count = np.diff(edges)
    return RowClasses.from_weights(count, weight / count)


def make_power_classes(rows: int, exponent: float) -> RowClasses:
    """Classes of a table whose row r is accessed as often as x ** -exponent, x from 1 to `rows` + 1, rounds down to
    r."""
    edges = _choose_edges(rows)
    count = np.diff(edges)
    return RowClasses.from_weights(count, _integrate_power(edges[:-1], edges[1:], exponent) / count)


def make_folded_classes(rows: int, exponent: float) -> RowClasses:
    """Classes of a table whose row r is accessed as r, r + `rows`, r + 2 `rows`... of a Zipf law without an end.

    What is beyond the first `rows` hardly differs between them: they share it evenly.
    """
    edges = _choose_edges(rows)
    weight, count = _compute_power_sums(edges, exponent), np.diff(edges)
    beyond = (rows + 0.5) ** (1.0 - exponent) / (exponent - 1.0)
    return RowClasses.from_weights(count, weight / count + beyond / rows)


def _choose_edges(rows: int) -> FloatArray:
    """First ranks of the classes, and one past the last."""
    single = np.arange(1, min(rows, _SINGLE) + 1)
    if rows <= _SINGLE:
        return np.asarray(np.append(single, rows + 1), dtype=np.float64)
    steps = int(np.ceil(np.log(rows / _SINGLE) / np.log(_RATIO))) + 1
    further = np.unique(np.round(np.geomspace(_SINGLE + 1, rows + 1, steps + 1)))
    return np.concatenate([single, further])


def _compute_power_sums(edges: FloatArray, exponent: float) -> FloatArray:
    """Sum of r ** -exponent over the ranks of each class: single ranks exactly, else by the integral."""
    single = np.diff(edges) == 1.0
    between = _integrate_power(edges[:-1] - 0.5, edges[1:] - 0.5, exponent)
    return np.asarray(np.where(single, edges[:-1] ** -exponent, between))


def _integrate_power(first: FloatArray, last: FloatArray, exponent: float) -> FloatArray:
    """Of x ** -exponent."""
    slope = 1.0 - exponent
    growth = np.log(last / first)
    return np.asarray(first**slope * (growth if slope == 0.0 else np.expm1(slope * growth) / slope))


MAX_EXPONENT = 10.0  # above, all lookups access one row
LEAST_FOLDED = 1.001  # at 1 the endless sum has no end, and every row is accessed alike
_SHOWN = 60  # characters of a wrong value that a message repeats


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every row is accessed equally often."""

    def make_classes(self, rows: int) -> RowClasses:
        """The one class of a table of `rows`."""
        return RowClasses.from_weights(np.array([float(rows)]), np.ones(1))


@dataclass(frozen=True, slots=True)
class Zipf:
    """The r-th most popular row is accessed in proportion to r ** -exponent."""

    exponent: float

    def __post_init__(self) -> None:
        _check_exponent("Zipf", self.exponent, 0.0)

    def make_classes(self, rows: int) -> RowClasses:
        """Classes of a table of `rows`."""
        return make_zipf_classes(rows, self.exponent)


@dataclass(frozen=True, slots=True)
class Power:
    """A number is drawn with density x ** -exponent between 1 and the table's number of rows, and rounded down: the
    `alpha` of NVIDIA's dynamicemb benchmark and of UGache."""

    exponent: float

    def __post_init__(self) -> None:
        _check_exponent("power law", self.exponent, 0.0)

    def make_classes(self, rows: int) -> RowClasses:
        """Classes of a table of `rows`."""
        return make_power_classes(rows, self.exponent)


@dataclass(frozen=True, slots=True)
class Folded:
    """Zipf's law without an end, its rows counted modulo the table's number of rows: the `alpha` above 1 of FBGEMM's
    benchmark.

    That one also draws the rows of a bag without repetition, which is left out here.
    """

    exponent: float

    def __post_init__(self) -> None:
        _check_exponent("folded Zipf", self.exponent, LEAST_FOLDED)

    def make_classes(self, rows: int) -> RowClasses:
        """Classes of a table of `rows`."""
        return make_folded_classes(rows, self.exponent)


def _check_exponent(distribution: str, exponent: float, least: float) -> None:
    """An endless law has a sum only above 1."""
    if not (isfinite(exponent) and least <= exponent <= MAX_EXPONENT):
        raise TraincastError(f"{distribution} exponent {exponent:g}; give a number from {least:g} to {MAX_EXPONENT:g}")


@dataclass(frozen=True, slots=True)
class Reuse:
    """The rows of one measured batch were accessed as often as `histogram` says."""

    histogram: ReuseHistogram

    def make_classes(self, rows: int) -> RowClasses:
        """Classes of a table of `rows` that would show the histogram."""
        return self.histogram.make_classes(rows)


Access = Uniform | Zipf | Power | Folded | Reuse
_LAWS: dict[str, type[Zipf] | type[Power] | type[Folded]] = {"zipf": Zipf, "power": Power, "folded": Folded}


@lru_cache(maxsize=4096)
def make_row_classes(access: Access, rows: int) -> RowClasses:
    """Classes of a table of `rows`, made once for each distribution and number of rows."""
    return access.make_classes(rows)


def parse_access(text: str) -> Access:
    """`uniform`, `zipf:EXPONENT`, `power:EXPONENT`, `folded:EXPONENT`, or a histogram as `format_access` writes it."""
    name, _, value = text.strip().partition(":")
    try:
        if name == "uniform" and not value:
            return Uniform()
        if name in _LAWS:
            return _LAWS[name](float(value))
        if name == "reuse":
            lookups, unique_rows, precision, *shares = (float(number) for number in value.split(","))
            half = len(shares) // 2
            return Reuse(
                ReuseHistogram(
                    lookups=lookups,
                    unique_rows=unique_rows,
                    precision=precision,
                    row_shares=tuple(shares[:half]),
                    access_shares=tuple(shares[half:]),
                )
            )
    except ValueError as error:
        if isinstance(error, TraincastError):
            raise
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    raise TraincastError(f"access '{shown}'; give 'uniform' or 'zipf:EXPONENT', such as zipf:1.05")


def format_access(access: Access) -> str:
    """The distribution as `parse_access` reads it; of a histogram lookups, different rows, precision, both shares."""
    if isinstance(access, Uniform):
        return "uniform"
    for name, distribution in _LAWS.items():
        if isinstance(access, distribution):
            return f"{name}:{access.exponent!r}"
    assert isinstance(access, Reuse)
    shown = access.histogram
    numbers = (shown.lookups, shown.unique_rows, shown.precision, *shown.row_shares, *shown.access_shares)
    return "reuse:" + ",".join(repr(float(number)) for number in numbers)


_SCATTER = 0x9E3779B1  # Knuth's multiplicative hash: neighbours in popularity are no neighbours in memory


def draw_rows(access: Access, rows: int, lookups: int, random: np.random.Generator) -> IntArray:
    """Row numbers (int64[lookups]) of a table of `rows`; popular rows are scattered over the table."""
    classes = make_row_classes(access, rows)
    chosen = random.choice(len(classes.rows), size=lookups, p=classes.rows * classes.probability)
    first = np.concatenate([[0.0], np.cumsum(classes.rows)[:-1]])
    rank = np.floor(first[chosen] + random.random(lookups) * classes.rows[chosen]).astype(np.int64)
    stride = _SCATTER % rows if rows > 1 else 1
    while gcd(stride, rows) != 1:
        stride += 1
    return np.asarray(np.minimum(rank, rows - 1) * stride % rows)

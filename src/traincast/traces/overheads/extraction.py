"""The five host overheads, measured in a linked timeline.

T1 between two top-level ops of a thread; T2 from an op's start to its first launch; T3 from its last launch to its
end; T4 a runtime call; T5 between two launches of an op, or (`alone`) the whole of an op that launches nothing. Time
in which a thread is held, by the device or by another thread, is not overhead and is left out.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from traincast.costs.host.profile import PYTHON, get_issuer
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

_LOWEST, _RATIO, _BINS = 1e-8, 1.05, 480  # seconds; the last bin begins at 130 s


def _make_zeros() -> FloatArray:
    return np.zeros(_BINS)


@dataclass(eq=False, slots=True)
class Distribution:
    """Times in seconds. Quantiles are exact to half a bin (2.5 %), means exact."""

    counts: FloatArray = field(default_factory=_make_zeros)
    sums: FloatArray = field(default_factory=_make_zeros)
    squares: FloatArray = field(default_factory=_make_zeros)

    @staticmethod
    def from_samples(seconds: FloatArray) -> Distribution:
        """The distribution of these times; negative ones count as zero."""
        values = np.maximum(np.asarray(seconds, dtype=np.float64), 0.0)
        place = np.log(np.maximum(values, _LOWEST) / _LOWEST) / np.log(_RATIO)
        bins = np.minimum(place.astype(np.int64), _BINS - 1)
        return Distribution(
            np.bincount(bins, minlength=_BINS).astype(np.float64),
            np.bincount(bins, weights=values, minlength=_BINS).astype(np.float64),
            np.bincount(bins, weights=values * values, minlength=_BINS).astype(np.float64),
        )

    def merge_with(self, other: Distribution) -> Distribution:
        """Both together, every sample counted alike."""
        return Distribution(self.counts + other.counts, self.sums + other.sums, self.squares + other.squares)

    def scale_by(self, factor: float) -> Distribution:
        """All times as many times as long, to half a bin."""
        bins = np.clip(np.arange(_BINS) + round(float(np.log(factor) / np.log(_RATIO))), 0, _BINS - 1)
        scaled = _make_zeros(), _make_zeros(), _make_zeros()
        for power, (column, old) in enumerate(zip(scaled, (self.counts, self.sums, self.squares), strict=True)):
            np.add.at(column, bins, factor**power * old)
        return Distribution(*scaled)

    @property
    def count(self) -> int:
        """Number of samples."""
        return int(self.counts.sum())

    @property
    def total(self) -> float:
        """Sum of all samples, outliers included."""
        return float(self.sums.sum())

    def compute_quantile(self, share: float) -> float:
        """The time below which this share of the samples is."""
        reached = np.cumsum(self.counts)
        place = int(np.searchsorted(reached, share * reached[-1], side="left"))
        while self.counts[place] == 0:
            place += 1
        return float(self.sums[place] / self.counts[place])

    def compute_mean_below(self, limit: float) -> float:
        """Mean in seconds of the samples under `limit` seconds, to half a bin."""
        edges = _LOWEST * _RATIO ** np.arange(_BINS)
        counted = self.counts[edges < limit].sum()
        return float(self.sums[edges < limit].sum() / counted) if counted else 0.0

    def compute_robust_moments(self) -> tuple[float, float]:
        """Mean and standard deviation without outliers: samples over 1.5 interquartile ranges beyond the quartiles."""
        if not self.count:
            return 0.0, 0.0
        low, high = self.compute_quantile(0.25), self.compute_quantile(0.75)
        reach = 1.5 * max(high - low, 0.05 * high)
        centre = np.divide(self.sums, self.counts, out=np.zeros(_BINS), where=self.counts > 0)
        kept = (self.counts > 0) & (centre >= low - reach) & (centre <= high + reach)
        count = self.counts[kept].sum()
        mean = self.sums[kept].sum() / count
        return float(mean), float(np.sqrt(max(self.squares[kept].sum() / count - mean * mean, 0.0)))

    def summarise_us(self) -> dict[str, float]:
        """Count, robust mean and deviation, and quantiles, in microseconds, for people and files."""
        mean, deviation = self.compute_robust_moments()
        figures = {"mean": mean, "std": deviation, "median": self.compute_quantile(0.5)}
        figures |= {f"p{round(100 * share):02d}": self.compute_quantile(share) for share in (0.05, 0.25, 0.75, 0.95)}
        return {"count": self.count, **{name: round(1e6 * value, 3) for name, value in figures.items()}}


# what the profiler adds, as the DLRM study measured it; a trace in which ops take less than this bounds it
_OP_COST_NS, _CALL_COST_NS = 2_000.0, 4_000.0
_BOUND_QUANTILE = 0.1  # of spacings and launches: the shortest, but for what the clock rounds
_JOIN_NS = 100_000  # a thread silent for longer than this while another works is waiting for it

_RUNTIME_CLASSES = (
    ("synchronize", re.compile(r"\w*Synchronize")),
    ("event", re.compile(r"\w*(?:WaitEvent|EventRecord|EventQuery)")),
    ("memcpy", re.compile(r"\w*[mM]emcpy")),
    ("memset", re.compile(r"\w*[mM]emset")),
    ("launch", re.compile(r"\w*Launch")),
)

# a gap between two ops of Python under its tracer, as shares of the usual gap: what every one takes, and what each
# begin or end of a call adds (0.6 us where the usual gap is 9 us, on four of five hosts within 25 %)
_TRACED_GAP, _TRACED_EDGE = 0.4, 0.067

LONGEST_GAP = 100e-6
"""Seconds between two ops that count as overhead; what is longer is work of the user's own."""

TYPES = ("T1", "T2", "T3", "T4", "T5", "alone")
"""The types of overhead, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class ProfilerCost:
    """Nanoseconds that recording one op, and one runtime call, adds to the host's time; `frame` comes on top of an op
    for every frame of the Python stack that is recorded with it, inside of the op."""

    op: float
    call: float
    frame: float = 0.0

    def sum_seconds(self, linked: Linked) -> float:
        """What recording adds to a mean step, in seconds."""
        rows = linked.host[linked.step[linked.host] >= 0]
        kinds = linked.events["kind"][rows]
        counts = np.isin(kinds, (Kind.OP, Kind.ANNOTATION)).sum(), (kinds == Kind.RUNTIME).sum()
        frames = linked.events["frames"][rows].sum()
        return 1e-9 * float(self.op * counts[0] + self.call * counts[1] + self.frame * frames) / len(linked.steps)


@dataclass(eq=False, slots=True)
class Overheads:
    """Distributions by (type, name): types "T1" by who issues the next op (`host.names`); "T2", "T3", "T5", "alone" by
    op; "T4" by runtime call. `cost` is what was taken off for recording (None where several traces are pooled)."""

    table: dict[tuple[str, str], Distribution] = field(default_factory=dict)
    cost: ProfilerCost | None = None

    def select_type(self, kind: str) -> dict[str, Distribution]:
        """Distributions of one type by name, those with the most time first."""
        by_name = {name: d for (k, name), d in self.table.items() if k == kind}
        return dict(sorted(by_name.items(), key=lambda item: -item[1].total))

    def sum_by_type(self) -> dict[str, float]:
        """Seconds by type over the whole trace."""
        totals: dict[str, float] = defaultdict(float)
        for (kind, _), distribution in self.table.items():
            totals[kind] += distribution.total
        return dict(totals)


def estimate_profiler_cost(linked: Linked) -> ProfilerCost:
    """The study's figures, or less where this trace leaves no room for them.

    Recording an op cannot take longer than the time between the shortest-spaced starts of two ops of a thread, and
    recording a runtime call not more than half of the shortest launches.
    """
    ops = linked.host[linked.events["kind"][linked.host] == Kind.OP]
    ops = ops[np.argsort(linked.thread[ops], kind="stable")]
    spacing = np.diff(linked.events["start"][ops])[np.diff(linked.thread[ops]) == 0]
    launches = linked.events["duration"][linked.is_launch]
    return ProfilerCost(
        op=min(_OP_COST_NS, _find_shortest(spacing)),
        call=min(_CALL_COST_NS, 0.5 * _find_shortest(launches)),
        frame=_estimate_frame_cost(linked),
    )


def _estimate_frame_cost(linked: Linked) -> float:
    """Nanoseconds a recorded Python frame takes: how the way from an op to the first one it calls grows with the
    depth of the stack; the weighted median over equal pairs of ops that were recorded at two depths."""
    events = linked.events
    if not events["frames"].any():
        return 0.0
    hops: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    seen: set[int] = set()
    for row in linked.host[events["kind"][linked.host] == Kind.OP].tolist():
        above = int(linked.parent[row])
        if above >= 0 and events["kind"][above] == Kind.OP and above not in seen:
            seen.add(above)
            pair = (int(events["name"][above]), int(events["name"][row]))
            hops[pair][int(events["frames"][above])].append(int(events["start"][row] - events["start"][above]))
    slopes, weights = [], []
    for depths in hops.values():
        for low, high in combinations(sorted(depths), 2):
            rise = float(np.median(depths[high]) - np.median(depths[low]))
            slopes.append(rise / (high - low))
            weights.append((high - low) * min(len(depths[low]), len(depths[high])))
    if not slopes:
        return 0.0
    order = np.argsort(slopes)
    half = np.searchsorted(np.cumsum(np.array(weights)[order]), 0.5 * sum(weights))
    return max(float(slopes[order[half]]), 0.0)


def _find_shortest(values: IntArray) -> float:
    return float(np.quantile(values, _BOUND_QUANTILE)) if len(values) else 0.0


def measure_overheads(linked: Linked, cost: ProfilerCost | None = None) -> Overheads:
    """Every overhead of a timeline with the profiler's cost taken off (pass a zero cost to keep it in)."""
    cost = estimate_profiler_cost(linked) if cost is None else cost
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    _Extraction(linked, cost, samples).extract_all()
    table = {key: Distribution.from_samples(1e-9 * np.array(values)) for key, values in samples.items()}
    return Overheads(table, cost)


class _Extraction:
    def __init__(self, linked: Linked, cost: ProfilerCost, samples: dict[tuple[str, str], list[float]]) -> None:
        self.linked, self.cost, self.samples = linked, cost, samples
        self.starts, self.ends = linked.events["start"], linked.end
        self.launches = _group_by_scope(linked, linked.is_launch)
        self.held = _group_by_scope(linked, linked.is_synchronise)
        self.waited_until = {
            scope: np.maximum.accumulate(linked.end[waits]).tolist() for scope, waits in self.held.items()
        }
        kinds = linked.events["kind"]
        self.records = _group_by_scope(linked, (kinds == Kind.OP) | (kinds == Kind.ANNOTATION))
        self.calls = _group_by_scope(linked, (kinds == Kind.RUNTIME) & ~linked.is_launch & ~linked.is_synchronise)
        self.frames = linked.events["frames"]
        self.all_spans = np.sort(self.starts[linked.scopes]), np.sort(self.ends[linked.scopes])

    def extract_all(self) -> None:
        self._extract_gaps()
        for scope in self.linked.scopes.tolist():
            self._extract_scope(scope)
        self._extract_runtime()

    def _extract_scope(self, scope: int) -> None:
        name = self.linked.get_name(scope)
        begin, end = int(self.starts[scope]), int(self.ends[scope])
        launches = self.launches.get(scope, [])
        if not launches:
            self._add_sample("alone", name, scope, begin, end)
            return
        self._add_sample("T2", name, scope, begin, int(self.starts[launches[0]]))
        for before, after in zip(launches, launches[1:], strict=False):
            self._add_sample("T5", name, scope, int(self.ends[before]), int(self.starts[after]))
        self._add_sample("T3", name, scope, int(self.ends[launches[-1]]), end)

    def _add_sample(self, kind: str, name: str, scope: int, begin: int, end: int) -> None:
        """One span of an op without what the host was held for and what the recording inside it cost."""
        span = float(end - begin)
        for row in self._find_waits(scope, begin, end):
            span -= max(min(int(self.ends[row]), end) - max(int(self.starts[row]), begin), 0)
        records = self._find_begun(self.records, scope, begin, end)
        span -= self.cost.op * len(records)
        span -= self.cost.call * len(self._find_begun(self.calls, scope, begin, end))
        if self.cost.frame:
            inside = [scope, *records] if begin <= self.starts[scope] < end else records
            span -= self.cost.frame * float(self.frames[inside].sum())
        self.samples[kind, name].append(max(span, 0.0))

    def _find_begun(self, rows: dict[int, list[int]], scope: int, begin: int, end: int) -> list[int]:
        """Those of a scope's rows that begin inside a span; found by halving, so that no op takes quadratic time."""
        under = rows.get(scope, [])
        start = self.starts.__getitem__
        return under[bisect_left(under, begin, key=start) : bisect_left(under, end, key=start)]

    def _find_waits(self, scope: int, begin: int, end: int) -> list[int]:
        """Those of a scope's waits that can reach into a span."""
        waits = self.held.get(scope)
        if not waits:
            return []
        last = bisect_left(waits, end, key=self.starts.__getitem__)
        return waits[bisect_right(self.waited_until[scope], begin) : last]

    def _extract_gaps(self) -> None:
        """T1: the usual gap from one top-level op of a thread to the next, unless it waited for another thread or a
        step began."""
        last: dict[int, int] = {}
        for scope in self.linked.scopes.tolist():
            thread, step = int(self.linked.thread[scope]), int(self.linked.step[scope])
            before = last.get(thread, -1)
            last[thread] = scope
            if before < 0 or self.linked.step[before] != step:
                continue
            begin, end = int(self.ends[before]), int(self.starts[scope])
            if end - begin > _JOIN_NS and self._is_other_thread_busy(thread, begin, end):
                continue
            issuer = get_issuer(self.linked.get_name(scope), main=thread == 0)
            span = max(end - begin - self.cost.op, 0.0)  # one op's end and the next one's begin are recorded in it
            if 1e-9 * span < LONGEST_GAP:
                span /= compare_with_usual_gap(self.linked, issuer, begin, end)
            self.samples["T1", issuer].append(span)

    def _is_other_thread_busy(self, thread: int, begin: int, end: int) -> bool:
        """Whether another thread ran a top-level op in this span."""
        own_starts, own_ends = self.linked.scope_spans[thread]
        return _count_overlapping(*self.all_spans, begin, end) > _count_overlapping(own_starts, own_ends, begin, end)

    def _extract_runtime(self) -> None:
        names = [classify_runtime_call(name) for name in self.linked.trace.names]
        rows = self.linked.host[self.linked.events["kind"][self.linked.host] == Kind.RUNTIME]
        blocking = find_blocking_copies(self.linked)
        for row, held in zip(rows.tolist(), self._compute_held_ns(rows).tolist(), strict=True):
            kind = names[self.linked.events["name"][row]]
            if not kind or blocking[row]:
                continue
            duration = float(self.linked.events["duration"][row]) - held
            self.samples["T4", kind].append(max(duration - self.cost.call, 0.0))

    def _compute_held_ns(self, rows: IntArray) -> IntArray:
        """How long the device held each of these calls: a synchronisation until the last work ended inside of it."""
        held = np.zeros(len(rows), dtype=np.int64)
        waiting = np.flatnonzero(self.linked.is_synchronise[rows])
        done = np.sort(self.ends[self.linked.device])
        if len(waiting) and len(done):
            place = np.searchsorted(done, self.ends[rows[waiting]], side="right") - 1
            last = np.where(place >= 0, done[np.maximum(place, 0)], 0)
            held[waiting] = np.maximum(last - self.starts[rows[waiting]], 0)
        return held


def compare_with_usual_gap(linked: Linked, issuer: str, begin: int, end: int) -> float:
    """How many times as long as usual a gap between two ops (nanoseconds `begin` to `end`) takes: where Python's tracer
    ran it says how much code lies between them."""
    if issuer != PYTHON or not len(linked.trace.python):
        return 1.0
    return _TRACED_GAP + _TRACED_EDGE * linked.trace.count_python_edges(begin, end)


def _count_overlapping(starts: IntArray, ends: IntArray, begin: int, end: int) -> int:
    """How many spans of these starts and ends, each sorted, reach into the one from `begin` to `end`."""
    return int(np.searchsorted(starts, end)) - int(np.searchsorted(ends, begin, side="right"))


def classify_runtime_call(name: str) -> str:
    """Which T4 a runtime call counts for: "launch", "memcpy", "memset", "synchronize", or "" for none."""
    return next((kind for kind, pattern in _RUNTIME_CLASSES if pattern.match(name)), "")


def find_blocking_copies(linked: Linked) -> BoolArray:
    """Which runtime calls held the host for their own copy: from pageable memory, or returning after it had ended."""
    blocking = np.zeros(len(linked.events), dtype=np.bool_)
    copies = np.flatnonzero((linked.events["kind"] == Kind.MEMCPY) & (linked.launch >= 0))
    calls = linked.launch[copies]
    pageable = np.array(["Pageable" in name for name in linked.trace.names])
    blocking[calls[pageable[linked.events["name"][copies]] | (linked.end[copies] <= linked.end[calls])]] = True
    return blocking


def _group_by_scope(linked: Linked, chosen: BoolArray) -> dict[int, list[int]]:
    """The chosen events under each scope, by start; a scope does not count as under itself."""
    inside: dict[int, list[int]] = defaultdict(list)
    rows = linked.host[chosen[linked.host] & (linked.scope[linked.host] >= 0)]
    for row, scope in zip(rows.tolist(), linked.scope[rows].tolist(), strict=True):
        if row != scope:
            inside[scope].append(row)
    return inside

"""Two traced runs side by side: what of the step changed, and which ops, matched by name and shape, explain it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np

from traincast.traces.breakdown import PARTS
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.markers import STEP
from traincast.traces.profiler.kernels import find_kernels_in_steps
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.utils.arrays import IntArray
from traincast.utils.display.text import format_milliseconds
from traincast.utils.errors import TraincastError
from traincast.utils.results import Records, Result

_DEEPEST = 64  # ops above a launch
_CANCELLED = 0.1  # of all changes: less than this is left of them
_NONE = (0.0, 0.0)
Times = dict[tuple[str, str], tuple[float | None, float]]
"""(count, seconds) of a step by name and shapes; predictions do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that both runs may have: how often in a step (None: not known), and seconds of a step. `share` is its
    part of the difference between the two runs: of the step for `parts`, of the kernels' or the host's time for all
    else; None where the runs do not differ, or changes cancel each other out."""

    name: str
    shapes: str
    count_before: float | None
    count_after: float | None
    before: float
    after: float
    share: float | None

    @property
    def change(self) -> float:
        """Seconds that a step takes longer by it."""
        return self.after - self.before

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds of a step."""
        return {
            "name": self.name, "shapes": self.shapes, "count_before": self.count_before,
            "count_after": self.count_after, "before_ms": 1e3 * self.before, "after_ms": 1e3 * self.after,
            "change_ms": 1e3 * self.change, "share": self.share,
        }  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TraceComparison(Result):
    """Two runs by the mean steps of their slowest ranks, in seconds, or a run and the prediction of it (`interval` is
    its 90 % interval then, else empty); the largest changes first.

    `parts` add up to the step. `families` and `ops` are kernel time (which overlaps, so it need not add up to the
    step), `ops` by the innermost op with recorded shapes, `calls` by all ops from the outermost to the innermost (the
    call tree), `modules` of a prediction by module; `host` is the time of top-level ops on the host.
    """

    names: tuple[str, str]
    step: tuple[float, float]
    kernels: tuple[int, int]
    interval: tuple[float, ...] = ()
    parts: tuple[Change, ...]
    families: tuple[Change, ...]
    ops: tuple[Change, ...]
    host: tuple[Change, ...] = ()
    calls: tuple[Change, ...] = ()
    modules: tuple[Change, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything, in milliseconds of a step."""
        return {
            "before": self.names[0],
            "after": self.names[1],
            "step_ms": {"before": 1e3 * self.step[0], "after": 1e3 * self.step[1]},
            "interval_ms": [1e3 * limit for limit in self.interval] or None,
            **self.records(),
        }

    def headline(self) -> str:
        """Both steps and their difference; of a prediction also whether its interval holds the step."""
        before, after = self.step
        change = f"{format_milliseconds(abs(after - before))} ms {'longer' if after >= before else 'shorter'}"
        text = (
            f"{self.names[1]} against {self.names[0]}: "
            f"{format_milliseconds(after)} ms per step, {change} ({after / (before or 1.0) - 1:+.1%})"
        )
        if not self.interval:
            return text
        low, high = self.interval
        where = "inside" if low <= after <= high else "outside"
        return f"{text}, {where} the 90 % interval of {format_milliseconds(low)} to {format_milliseconds(high)} ms"

    def records(self) -> Records:
        """Tables "parts", "families", "ops", "host", "calls" and "modules"."""
        tables = ("parts", "families", "ops", "host", "calls", "modules")
        return {name: [c.to_dict() for c in getattr(self, name)] for name in tables}


def find_slowest_rank(report: TraceReport) -> RankReport:
    """The rank with the longest median step."""
    return max(report.ranks, key=lambda rank: rank.median_step.step)


def compare_reports(before: TraceReport, after: TraceReport) -> TraceComparison:
    """What changed from one run to the other."""
    old, new = find_slowest_rank(before), find_slowest_rank(after)
    for rank in (old, new):
        if not rank.steps:
            raise TraincastError(f"'{rank.linked.trace.path}' has no step to compare")
    return TraceComparison(
        names=(old.linked.trace.path.name, new.linked.trace.path.name),
        step=(compute_mean_step(old, "step"), compute_mean_step(new, "step")),
        kernels=(old.median_step.kernels, new.median_step.kernels),
        parts=list_changes(_sum_parts(old), _sum_parts(new)),
        families=list_changes(sum_families(old), sum_families(new)),
        ops=list_changes(_sum_ops(old.linked), _sum_ops(new.linked)),
        host=list_changes(_sum_host(old.linked), _sum_host(new.linked)),
        calls=list_changes(_sum_calls(old.linked), _sum_calls(new.linked)),
    )


def compute_mean_step(rank: RankReport, part: str) -> float:
    """The mean of the steps, or of a part of them, in seconds."""
    return float(np.mean([getattr(step, part) for step in rank.steps]))


def list_changes(before: Times, after: Times) -> tuple[Change, ...]:
    """What is in either, the largest change first; shares of a sum in which changes cancel out mean nothing."""
    whole = sum(seconds for _, seconds in after.values()) - sum(seconds for _, seconds in before.values())
    moved = sum(abs(after.get(key, _NONE)[1] - before.get(key, _NONE)[1]) for key in {**before, **after})
    told = abs(whole) > _CANCELLED * moved
    rows = []
    for key in {**before, **after}:
        (old_count, old), (new_count, new) = before.get(key, _NONE), after.get(key, _NONE)
        rows.append(
            Change(
                name=key[0], shapes=key[1], count_before=old_count, count_after=new_count, before=old, after=new,
                share=(new - old) / whole if told else None,
            )
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -abs(row.change)))


def _sum_parts(rank: RankReport) -> Times:
    return {(name, ""): (1.0, compute_mean_step(rank, name)) for name in PARTS}


def sum_families(rank: RankReport) -> Times:
    """Kernel time by family."""
    rows = find_kernels_in_steps(rank.linked)
    return sum_by_name(rank.linked.find_families(rows).tolist(), rank.linked, rows)


def _sum_host(linked: Linked) -> Times:
    rows = linked.scopes[linked.step[linked.scopes] >= 0]
    return sum_by_name(map(linked.get_name, rows.tolist()), linked, rows)


def _sum_ops(linked: Linked) -> Times:
    """Kernel time by the innermost op whose shapes were recorded, else by the innermost op, else by the kernel."""
    rows, found = find_kernels_in_steps(linked), dict[int, int]()
    shapes = cache(lambda number: format_shapes(linked.trace.details[number]))

    def find_op(above: int) -> int:
        if above not in found:
            ops = [op for op in (above, *linked.iterate_enclosing(above)) if linked.events["kind"][op] == Kind.OP]
            found[above] = next((op for op in ops if linked.events["details"][op] > 0), ops[0] if ops else -1)
        return found[above]

    def name_op(row: int) -> tuple[str, str]:
        author = int(linked.author[row])
        above = int(linked.parent[author]) if author >= 0 else -1
        op = find_op(above) if above >= 0 else -1
        if op < 0:
            return linked.get_name(row), ""
        return linked.get_name(op), shapes(int(linked.events["details"][op]))

    return _sum_by_key(map(name_op, rows.tolist()), linked, rows)


def _sum_calls(linked: Linked) -> Times:
    """Kernel time by the names of all ops around the launch, outermost first."""
    rows = find_kernels_in_steps(linked)
    named: dict[int, str] = {-1: ""}

    def name_path(row: int) -> str:
        chain: list[int] = []
        while row not in named and len(chain) < _DEEPEST:
            chain.append(row)
            row = int(linked.parent[row])
        for inner in reversed(chain):
            above = named.get(int(linked.parent[inner]), "")
            is_op = linked.events["kind"][inner] == Kind.OP and not STEP.match(linked.get_name(inner))
            named[inner] = (f"{above} > " if above else "") + linked.get_name(inner) if is_op else above
        return named[chain[0]] if chain else named[row]

    author = linked.author[rows]
    above = np.where(author >= 0, linked.parent[np.maximum(author, 0)], -1)
    return sum_by_name((name_path(row) or "(no op)" for row in above.tolist()), linked, rows)


def sum_by_name(names: Iterable[str], linked: Linked, rows: IntArray) -> Times:
    """How often each name comes in a step, and the seconds of these events, one name for each."""
    return _sum_by_key(((name, "") for name in names), linked, rows)


def _sum_by_key(keys: Iterable[tuple[str, str]], linked: Linked, rows: IntArray) -> Times:
    steps = len(linked.steps)
    lengths: dict[tuple[str, str], list[int]] = {}
    for key, nanoseconds in zip(keys, linked.events["duration"][rows].tolist(), strict=True):
        lengths.setdefault(key, []).append(nanoseconds)
    return {key: (len(found) / steps, 1e-9 * sum(found) / steps) for key, found in lengths.items()}


def format_shapes(details: bytes) -> str:
    """Recorded shapes in one line: "1024x512 512x96"; "" where there are none."""
    try:
        dims = msgspec.json.decode(details).get("dims") if details else None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, AttributeError):
        return ""
    return " ".join("x".join(map(str, dim)) for dim in dims if _is_shape(dim)) if isinstance(dims, list) else ""


def _is_shape(dim: Any) -> bool:
    return isinstance(dim, list) and bool(dim) and all(isinstance(size, int) for size in dim)

"""Hardware counters that CUPTI's range profiler writes: read from a trace, and summed by op and kernel.

Kineto records them in place of kernels (`cuda_profiler_range`), one range after the other; their times mean nothing.
Ranges of single kernels come in the order of the launches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from traincast.traces.events import CounterRange, Kind
from traincast.traces.link import Linked
from traincast.utils.errors import escape_text

CATEGORY = "cuda_profiler_range"
_MOST_VALUES = 1_000_000  # counters of all ranges that are kept
_LAUNCH_KERNEL = re.compile(r"(?:cuda|cu)\w*Launch\w*Kernel\w*")
_FLOPS = re.compile(r"smsp__sass_thread_inst_executed_op_[dfh](add|mul|fma)_pred_on\.sum")


class CounterReader:
    """Collects the ranges of a trace's batches of events, each put right by `repair` first."""

    def __init__(self, repair: Callable[[bytes], bytes]) -> None:
        self.ranges: list[CounterRange] = []
        self._repair = repair
        self._values = 0

    def add_batch(self, raw: bytes) -> None:
        """Keeps the ranges among these events, an array of them or a single one."""
        if CATEGORY.encode() not in raw or self._values >= _MOST_VALUES:
            return
        try:
            found = msgspec.json.decode(self._repair(raw))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return
        for event in found if isinstance(found, list) else [found]:
            if isinstance(event, dict) and event.get("cat") == CATEGORY:
                self._add_range(event)

    def _add_range(self, event: dict[str, Any]) -> None:
        recorded, start = event.get("args"), event.get("ts")
        values = {
            escape_text(name)[:120]: float(value)
            for name, value in (recorded.items() if isinstance(recorded, dict) else ())
            if isinstance(value, int | float) and not isinstance(value, bool) and "__" in name
        }
        if isinstance(start, int | float) and isinstance(event.get("name"), str):
            self._values += 1 + len(values)
            self.ranges.append(CounterRange(escape_text(event["name"]), float(start), values))


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterRow:
    """The counters of a kernel below an op ("": it is not known), summed over `count` runs. `flops` are the operations
    of CUDA cores that they say (None: not counted), of which a fused multiply-add is two."""

    op: str
    kernel: str
    count: int
    flops: float | None
    values: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with a column for each counter."""
        return {"op": self.op, "kernel": self.kernel, "count": self.count, "flops": self.flops, **self.values}


def make_counter_rows(linked: Linked) -> tuple[CounterRow, ...]:
    """Counters by op and kernel, those with most operations, or most of the first counter, first."""
    ranges = sorted(linked.trace.counters, key=lambda entry: entry.start)
    names = list(dict.fromkeys(name for entry in ranges for name in entry.values))
    sums: dict[tuple[str, str], tuple[int, dict[str, float]]] = {}
    for entry, op in zip(ranges, _find_ops(linked, ranges), strict=True):
        count, values = sums.get((op, entry.name), (0, dict.fromkeys(names, 0.0)))
        for name, value in entry.values.items():
            values[name] += value
        sums[op, entry.name] = count + 1, values
    rows = [
        CounterRow(op=op, kernel=kernel, count=count, flops=_count_flops(values), values=values)
        for (op, kernel), (count, values) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: -(row.flops or next(iter(row.values.values()), 0.0))))


def _find_ops(linked: Linked, ranges: Sequence[CounterRange]) -> list[str]:
    """The innermost op that launched the kernel of every range; "" where there are not as many launches."""
    calls = _list_launches(linked)
    if len(calls) != len(ranges):
        return [""] * len(ranges)
    kind = linked.events["kind"]
    return [
        next((linked.get_name(row) for row in linked.iterate_enclosing(call) if kind[row] == Kind.OP), "")
        for call in calls
    ]


def _list_launches(linked: Linked) -> list[int]:
    calls = np.flatnonzero(linked.find_runtime_rows(_LAUNCH_KERNEL))
    return [int(call) for call in calls[np.argsort(linked.events["start"][calls], kind="stable")]]


def _count_flops(values: dict[str, float]) -> float | None:
    found = [(2 if kind[1] == "fma" else 1) * value for name, value in values.items() if (kind := _FLOPS.match(name))]
    return sum(found) if found else None


def note_counters(linked: Linked) -> list[str]:
    """That a trace has counters, and whether their ops are known."""
    ranges, calls = len(linked.trace.counters), len(_list_launches(linked))
    if not ranges:
        return []
    ops = "their ops are those of the launches, in order" if ranges == calls else (
        f"there are {calls} launches, so their ops are not known"
    )  # fmt: skip
    return [f"hardware counters of {ranges} ranges, which CUPTI records in place of kernels and without times: {ops}"]

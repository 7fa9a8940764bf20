"""Kernels by name: how often, how long, what share of the device's time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.traces.link import Linked
from traincast.utils.arrays import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All kernels of one name in the steps of a trace; seconds. `share` is that of the time of all kernels."""

    name: str
    family: str
    count: int
    total: float
    mean: float
    shortest: float
    longest: float
    share: float


def make_kernel_rows(linked: Linked) -> tuple[KernelRow, ...]:
    """Kernels, copies and memsets by name, those with most time first."""
    rows = find_kernels_in_steps(linked)
    names, group = np.unique(linked.events["name"][rows], return_inverse=True)
    group = group.reshape(-1)
    seconds = 1e-9 * linked.events["duration"][rows]
    count, total = np.bincount(group, minlength=len(names)), np.bincount(group, seconds, minlength=len(names))
    low, high = np.full(len(names), np.inf), np.zeros(len(names))
    np.minimum.at(low, group, seconds)
    np.maximum.at(high, group, seconds)
    whole = float(total.sum()) or 1.0
    return tuple(
        KernelRow(
            name=linked.trace.names[int(names[i])],
            family=linked.find_family(int(names[i])),
            count=int(count[i]),
            total=float(total[i]),
            mean=float(total[i] / count[i]),
            shortest=float(low[i]),
            longest=float(high[i]),
            share=float(total[i] / whole),
        )
        for i in np.argsort(-total, kind="stable").tolist()
    )


def find_kernels_in_steps(linked: Linked) -> IntArray:
    """Kernels, copies and memsets that belong to a step, by start."""
    rows: IntArray = linked.device[linked.step[linked.device] >= 0]
    return rows

"""What charts show, as plain data that the page's scripts draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import DRAM_SHARE
from traincast.costs.kernels.work import count_work
from traincast.hardware.device import Device
from traincast.ir.program import compute_live_bytes
from traincast.simulator.prediction.scaling import ScalingCurve
from traincast.simulator.timeline import Timeline
from traincast.traces.profiler.memory import MemoryPoint
from traincast.utils.arrays import FloatArray

_MOST_POINTS = 600  # of a curve: more than a screen has pixels for
_MOST_DEVICES = 8  # of one trace: a node has no more
_NEAR = 0.4  # share of the capacity from which its line is drawn: below, it would only flatten the curve
Chart = dict[str, Any]


def make_memory_chart(timeline: Timeline, capacity: float) -> Chart:
    """Live device memory (GB) over the time at which the host issues ops (ms), with the device's capacity."""
    schedule, program = timeline.schedule, timeline.program
    issued = np.full(program.num_ops, -np.inf)
    launched = schedule.op >= 0
    np.maximum.at(issued, schedule.op[launched], timeline.times.host_issue[launched] - timeline.origin)
    moments = np.maximum.accumulate(np.concatenate(([0.0], np.maximum(issued, 0.0))))
    live = compute_live_bytes(program)[:-1] / 1e9
    x, y = _thin_curve(1e3 * moments, live)
    last = max(float(x[-1]), 1e3 * timeline.seconds)
    x, y = np.append(x, last), np.append(y, y[-1])
    series: list[dict[str, Any]] = [{"label": "live", "y": _round_numbers(y), "kind": "step"}]
    if y.max() > _NEAR * capacity / 1e9:
        line = [capacity / 1e9] * len(x)
        series.append({"label": "capacity", "y": line, "kind": "edge", "dash": 1, "strong": True})
    return {"x": _round_numbers(x), "x_label": "host time, ms", "y_label": "GB on the device", "series": series}


def make_traced_memory_chart(points: Sequence[MemoryPoint]) -> Chart | None:
    """Allocated memory (GB) of the first devices over the traced steps (ms); None where it was not recorded."""
    devices = list(dict.fromkeys(point.device for point in points))[:_MOST_DEVICES]
    if not devices:
        return None
    curves = {device: [point for point in points if point.device == device] for device in devices}
    moments = np.unique([point.seconds for own in curves.values() for point in own])
    series = []
    for device, own in curves.items():
        at = np.searchsorted([point.seconds for point in own], moments, side="right") - 1
        allocated = np.array([point.allocated for point in own])[np.maximum(at, 0)] / 1e9
        series.append({"label": f"device {device}", "y": _round_numbers(allocated), "kind": "step"})
    return {"x": _round_numbers(1e3 * moments), "x_label": "ms from the first step", "y_label": "GB on the device",
            "series": series}  # fmt: skip


def _thin_curve(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """At most this many points, of every stretch the highest."""
    if len(x) <= _MOST_POINTS:
        return x, y
    edges = np.linspace(0, len(x), _MOST_POINTS + 1).astype(np.int64)[:-1]
    highest = np.maximum.reduceat(y, edges)
    return x[edges], highest


def make_scaling_chart(curve: ScalingCurve) -> Chart:
    """Milliseconds of a step over GPUs, with the 90 % interval as a band."""
    results = [point.answer for point in curve.points]
    return {
        "x": [point.gpus for point in curve.points], "x_label": "GPUs", "y_label": "ms per step",
        "log_x": True, "base_x": 2,
        "series": [
            {"label": "low", "y": [1e3 * a.interval[0] for a in results], "kind": "edge"},
            {"label": "high", "y": [1e3 * a.interval[1] for a in results], "kind": "edge", "slot": 0, "band": True},
            {"label": "ms per step", "y": [1e3 * a.iteration for a in results], "kind": "line", "slot": 0},
        ],
    }  # fmt: skip


def make_roofline_chart(points: Sequence[RooflinePoint], device: Device) -> Chart:
    """Operations a second over operations per byte, both logarithmic: kernels by family below what the device can
    do."""
    families = list(dict.fromkeys(point.family for point in points))
    low = min(point.intensity for point in points) / 2
    high = max(max(point.intensity for point in points) * 2, 1e3)
    grid = np.geomspace(low, high, 60)
    placed = sorted(points, key=lambda point: point.intensity)
    x = np.concatenate((grid, [point.intensity for point in placed]))
    order = np.argsort(x, kind="stable")
    series = [
        {
            "label": label,
            "y": _round_numbers(np.minimum(rate, bandwidth * x)[order] / 1e12),
            "kind": "edge",
            "dash": dash,
            "strong": True,
        }
        for label, rate, bandwidth, dash in _list_ceilings(placed, device)
    ]
    for slot, family in enumerate(families):
        column: list[float | None] = [None for _ in grid]
        column += [p.flops / p.seconds / 1e12 if p.family == family else None for p in placed]
        series.append({"label": family, "y": [column[place] for place in order], "kind": "points", "slot": slot})
    return {
        "x": _round_numbers(x[order]),
        "x_label": "operations per byte",
        "y_label": "10^12 operations per second",
        "log_x": True,
        "log_y": True,
        "series": series,
    }


class RooflinePoint:
    """One distinct call of a step: its family, kind and type, how often it runs, seconds, operations and bytes."""

    __slots__ = ("compute", "count", "family", "flops", "kind", "nbytes", "seconds")

    def __init__(
        self, family: str, kind: str, compute: str, count: int, seconds: float, flops: float, nbytes: float
    ) -> None:
        self.family, self.kind, self.compute, self.count = family, kind, compute, count
        self.seconds, self.flops, self.nbytes = seconds, flops, nbytes

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.nbytes


def find_roofline_points(timeline: Timeline) -> list[RooflinePoint]:
    """Every distinct call with arithmetic in it, those with most device time first; times are those of one launch."""
    number = timeline.schedule.call[timeline.launches]
    count = np.bincount(number, minlength=len(timeline.calls))
    total = np.bincount(number, weights=timeline.kernel_seconds, minlength=len(timeline.calls))
    points = []
    for index in np.argsort(-total, kind="stable").tolist():
        call = timeline.calls[index]
        done = count_work(Calls.of(call.family, [call])) if count[index] and total[index] > 0 else None
        if done is None or not (done[0][0] > 0 and done[1][0] > 0):
            continue
        each = float(total[index] / count[index])
        points.append(
            RooflinePoint(call.family.name, call.kind, call.compute, int(count[index]), each, float(done[0][0]),
                          float(done[1][0]))
        )  # fmt: skip
    return points


def _list_ceilings(points: Sequence[RooflinePoint], device: Device) -> list[tuple[str, float, float, int]]:
    """What the device holds under load, for every type that kernels compute in, and what its data sheet promises."""
    used = [name for name in dict.fromkeys(point.compute for point in points) if name in device.peak_flops] or ["fp32"]
    real = DRAM_SHARE * device.dram_bandwidth
    fastest = max(used, key=device.get_peak_flops)
    held = [(f"{name}, sustained", device.get_sustained_flops(name), real, 0) for name in used]
    return [*held, (f"{fastest}, data sheet", device.get_peak_flops(fastest), device.dram_bandwidth, 1)]


def _round_numbers(values: FloatArray) -> list[float]:
    """Plain numbers of five digits, which is more than a chart shows."""
    return [float(f"{value:.5g}") for value in values.tolist()]

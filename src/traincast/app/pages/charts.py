"""What charts show, as plain data that the page's scripts draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import DRAM_SHARE
from traincast.costs.kernels.work import count_work
from traincast.hardware.device import Device
from traincast.ir.memory import CATEGORIES
from traincast.simulator.memory.device_memory import DeviceMemory
from traincast.simulator.prediction.scaling import ScalingCurve
from traincast.simulator.timeline import Timeline
from traincast.traces.profiler.memory import MemoryPoint
from traincast.utils.arrays import FloatArray

_MOST_POINTS = 600  # of a curve: more than a screen has pixels for
_MOST_DEVICES = 8  # of one trace: a node has no more
_LEAST_INTENSITY = 1e-3  # operations per byte: below, a kernel copies
_NEAR = 0.4  # share of the capacity from which its line is drawn: below, it would only flatten the curve
Chart = dict[str, Any]


def make_memory_chart(memory: DeviceMemory) -> Chart:
    """Allocated memory (GB) of the fullest rank over its step (% of what its host allocates and frees), categories
    stacked, with the peak marked and the device's capacity."""
    ticks, sums = memory.events.sample_categories(_MOST_POINTS)
    x = 100.0 * (ticks + 1) / max(memory.events.ticks, 1)
    shown = np.flatnonzero(sums.max(axis=1) > 0)
    stacked = np.cumsum(sums[shown], axis=0) / 1e9
    series: list[dict[str, Any]] = [
        {"label": CATEGORIES[number].replace("_", " "), "y": _round_numbers(y), "kind": "step", "slot": place % 8,
         "band": place > 0}
        for place, (number, y) in enumerate(zip(shown.tolist(), stacked, strict=True))
    ]  # fmt: skip
    peak = [memory.peak_bytes / 1e9 if tick == memory.events.peak_tick else None for tick in ticks.tolist()]
    series.append({"label": "peak", "y": peak, "kind": "points", "strong": True})
    if memory.peak_bytes > _NEAR * memory.limit_bytes:
        line = [memory.limit_bytes / 1e9] * len(ticks)
        series.append({"label": "capacity", "y": line, "kind": "edge", "dash": 1, "strong": True})
    return {"x": _round_numbers(x), "x_label": "of the step, %", "y_label": "GB on the device", "series": series}


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
        if done is None or not done[0][0] > _LEAST_INTENSITY * done[1][0] > 0:
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

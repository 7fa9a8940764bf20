"""Which of a platform's numbers a step depends on, and which measurement would narrow its interval most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from traincast.planner.what_if.difference import list_error_sources
from traincast.planner.what_if.edits.registry import parse_edits
from traincast.planner.what_if.result import prepare_both_sides
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.display.text import format_milliseconds
from traincast.utils.narrowing import Part, compute_half_width, rank_by_remaining_width
from traincast.utils.results import Records, Result

_STEP = 1.05  # each number is changed by so much, both ways
NUMBERS = {
    "memory bandwidth": ("memory-speed", 1),
    "SM clock": ("clock-speed", 1),
    "launch cost": ("launch-speed", -1),
    "host overheads": ("host-speed", -1),
    "link bandwidth": ("link-speed", 1),
    "network bandwidth": ("nic-speed", 1),
    "link latency": ("link-latency", 1),
}
"""A platform's numbers, the edit that changes each, and whether the number grows or falls with the edit's value."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Sensitivity(Result):
    """`elasticities`: per cent that the step grows when a number grows by one per cent. `measurements`: by what would
    be measured, the half-width of the 90 % interval (as a share of the step) that would be left."""

    step: Prediction
    elasticities: dict[str, float]
    measurements: dict[str, float]
    half_width: float

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "iteration_ms": 1e3 * self.step.iteration,
            "interval_half_width": self.half_width,
            "elasticities": self.elasticities,
            "half_width_if_measured": self.measurements,
        }

    def headline(self) -> str:
        """The number that matters most, and the measurement that would help most."""
        number = max(self.elasticities, key=lambda name: abs(self.elasticities[name]))
        first = self.step.headline().split("\n")[0]
        lines = [
            f"{first}: {format_milliseconds(self.step.iteration)} ms per step",
            f"depends most on the {number}: elasticity {self.elasticities[number]:+.2f}",
        ]
        if self.measurements:
            best = next(iter(self.measurements))
            left = self.measurements[best]
            lines.append(f"measuring {best} narrows the interval from ±{self.half_width:.1%} to ±{left:.1%}")
        return "\n".join(lines)

    def records(self) -> Records:
        """Tables "elasticities" and "measurements"."""
        return {
            "elasticities": [{"number": name, "elasticity": value} for name, value in self.elasticities.items()],
            "measurements": [{"measured": name, "half_width": value} for name, value in self.measurements.items()],
        }


def analyse_sensitivity(resolved: Resolved) -> Sensitivity:
    """Elasticities of a step and what its interval is made of."""
    step = predict(resolved)
    found = {
        name: _measure_elasticity(resolved, edit, sign)
        for name, (edit, sign) in NUMBERS.items()
        if _is_relevant(resolved, edit)
    }
    elasticities = dict(sorted(found.items(), key=lambda item: -abs(item[1])))
    parts = _list_measurements(resolved, step)
    return Sensitivity(
        step=step,
        elasticities=elasticities,
        measurements=rank_by_remaining_width(parts),
        half_width=compute_half_width(parts),
    )


def _is_relevant(resolved: Resolved, edit: str) -> bool:
    return resolved.gpus > 1 or edit not in ("link-speed", "nic-speed", "link-latency")


def _measure_elasticity(resolved: Resolved, edit: str, sign: int) -> float:
    times = [
        predict(prepare_both_sides(resolved, parse_edits([f"{edit}={factor!r}"]))[1]).iteration
        for factor in (1 / _STEP, _STEP)
    ]
    return sign * math.log(times[1] / times[0]) / (2 * math.log(_STEP))


def _list_measurements(resolved: Resolved, step: Prediction) -> dict[str, Part]:
    """What a step's interval is made of, by what a measurement would be of. A kernel's own errors average out in a
    step and are no part of its interval."""
    found: dict[str, list[tuple[float, float]]] = {}
    for source, sigma in list_error_sources(resolved, step).items():
        assert isinstance(source, tuple)
        kind = str(source[0])
        if kind == "kernel" or not sigma > 0:
            continue
        name = {
            "family": f"{source[1]} kernels", "host": "the host's overheads",
            "release": "a step with this software", "setup": "a step on this system", "layout": "a step of this layout",
            "unknown": "ops that are not known",
        }[kind]  # fmt: skip
        found.setdefault(name, []).append((_compute_share(step, kind, str(source[1])), sigma))
    return {name: _merge_sources(entries) for name, entries in found.items()}


def _merge_sources(entries: list[tuple[float, float]]) -> Part:
    """Sources of one name as one part."""
    share = sum(share for share, _ in entries)
    return Part(share, math.hypot(*(sigma for _, sigma in entries)) / share)


def _compute_share(step: Prediction, kind: str, name: str) -> float:
    """The share of the step's time that a source of errors is about; all of it where that is not one of its parts."""
    seconds = {
        "family": step.by_family.get(name, 0.0), "host": step.device_idle, "unknown": step.estimated_seconds
    }.get(kind, step.iteration)  # fmt: skip
    return seconds / step.iteration if seconds > 0 else 1.0

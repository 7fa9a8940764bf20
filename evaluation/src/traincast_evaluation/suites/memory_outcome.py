"""A measured peak of memory beside its prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from traincast.simulator.memory.device_memory import DeviceMemory


@dataclass(frozen=True, kw_only=True)
class MemoryOutcome:
    """A measured peak beside its prediction, in bytes with the 90 % interval; `measured` None: out of memory."""

    name: str
    source: str
    kind: str
    measured: float | None
    predicted: float
    interval: tuple[float, float]
    fits: bool
    held_back: bool

    @property
    def covered(self) -> bool | None:
        """Whether the measured peak is inside the interval."""
        return None if self.measured is None else self.interval[0] <= self.measured <= self.interval[1]

    @property
    def distance(self) -> float:
        """How far the measured peak is from the predicted one, in half-widths of the interval on that side."""
        assert self.measured is not None
        low, high = self.interval
        width = math.log(high / self.predicted if self.measured > self.predicted else self.predicted / low)
        return abs(math.log(self.measured / self.predicted)) / max(width, 1e-12)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, GB; the keys of every suite's cases that say milliseconds are there without a value."""
        measured = self.measured
        return {
            "device": f"{self.source}, {self.kind}",
            "case": self.name,
            "measured_ms": None,
            "predicted_ms": None,
            "interval_ms": [],
            "measured_gb": None if measured is None else measured / 1e9,
            "out_of_memory": measured is None,
            "predicted_gb": self.predicted / 1e9,
            "interval_gb": [bound / 1e9 for bound in self.interval],
            "covered": self.covered,
            "fits": self.fits,
            "held_back": self.held_back,
            "error_percent": None if measured is None else 100 * (self.predicted / measured - 1),
        }


def make_outcome(
    name: str, source: str, kind: str, measured: float | None, memory: DeviceMemory, *, held_back: bool
) -> MemoryOutcome:
    """The outcome of a prediction."""
    bytes_of = {"allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "used": memory.used_bytes}
    intervals = {
        "allocated": memory.allocated_interval, "reserved": memory.reserved_interval, "used": memory.used_interval,
    }  # fmt: skip
    return MemoryOutcome(
        name=name, source=source, kind=kind, measured=measured, predicted=bytes_of[kind], interval=intervals[kind],
        fits=memory.fits, held_back=held_back,
    )  # fmt: skip

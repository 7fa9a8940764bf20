"""A measured time against message size, kept as the few points between which it is a latency plus a bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from traincast.utils.arrays import BoolArray, FloatArray

SMALL_BYTES = 65536  # up to here the latency decides; spreads are kept apart on both sides


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds at growing message sizes, never falling. Each stretch is one regime of the library underneath.

    `measured` is the range of bytes the points came from; `sigma` the spread of log time up to 64 KiB and above.
    """

    bytes: FloatArray
    seconds: FloatArray
    sigma: tuple[float, float]
    measured: tuple[float, float]

    @property
    def floor(self) -> float:
        """Seconds of the smallest message."""
        return float(self.seconds[0])

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the last stretch: what the largest messages reach."""
        return float((self.bytes[-1] - self.bytes[-2]) / max(self.seconds[-1] - self.seconds[-2], 1e-12))

    def at(self, message: FloatArray) -> FloatArray:
        """Seconds for messages of this many bytes; beyond the last point the last bandwidth goes on."""
        inside = np.interp(message, self.bytes, self.seconds)
        return np.asarray(inside + np.maximum(message - self.bytes[-1], 0.0) / self.bandwidth)

    def sigma_at(self, message: FloatArray) -> FloatArray:
        """Spread of log time for messages of this many bytes."""
        return np.where(message <= SMALL_BYTES, *self.sigma)

    def covers(self, message: FloatArray) -> BoolArray:
        """Whether messages are within what was measured."""
        return (message >= self.measured[0]) & (message <= self.measured[1])

    def to_json(self) -> dict[str, Any]:
        """The curve as plain data, rounded to what the measurements can carry."""
        return {
            "bytes": [float(f"{value:.12g}") for value in self.bytes],
            "us": [float(f"{1e6 * value:.5g}") for value in self.seconds],
            "sigma": [round(value, 4) for value in self.sigma],
            "measured_bytes": list(self.measured),
        }

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Curve:
        """The curve from its plain data."""
        small, large = entry["sigma"]
        low, high = entry["measured_bytes"]
        return Curve(
            bytes=np.array(entry["bytes"], dtype=np.float64),
            seconds=1e-6 * np.array(entry["us"], dtype=np.float64),
            sigma=(float(small), float(large)),
            measured=(float(low), float(high)),
        )

"""How a measurement was timed: what a stopwatch shows of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.utils.arrays import FloatArray, IntArray

EDGE = 12.0
"""Sharpness of the corner between a host-bound and a device-bound measurement."""


def as_timed(seconds: FloatArray, floor: FloatArray, offset: FloatArray) -> FloatArray:
    """What a stopwatch shows for a kernel of `seconds`: never less than the host's `floor`, and `offset` on top."""
    shown = offset + seconds
    ratio = np.minimum(floor, shown) / np.maximum(floor, shown)
    return np.asarray(np.maximum(floor, shown) * (1.0 + ratio**EDGE) ** (1.0 / EDGE))


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """How each measurement was timed: rows of `group` share a host floor and an offset, in seconds (see
    `as_timed`). Zero floor and offset: the kernel alone. `weight` is how much a measurement counts."""

    group: IntArray
    floor: FloatArray
    offset: FloatArray
    weight: FloatArray

    @staticmethod
    def none(n: int) -> Stopwatch:
        """Measurements of kernels alone."""
        return Stopwatch(np.zeros(n, dtype=np.int64), np.zeros(1), np.zeros(1), np.ones(n))

    def shown(self, seconds: FloatArray, rows: IntArray) -> FloatArray:
        """What it shows for kernels of these measurements."""
        group = self.group[rows]
        return as_timed(seconds, np.maximum(self.floor[group], 1e-9), np.maximum(self.offset[group], 1e-9))

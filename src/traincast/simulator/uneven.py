"""Ranks that are not quite alike: late data and slower machines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError


@dataclass(frozen=True, kw_only=True)
class Unevenness:
    """How ranks differ from each other by chance, the same for the same `seed`.

    The host of each rank begins its step up to `skew_ms` milliseconds late (data loading, uniformly), and every
    kernel and stretch of host work takes longer by the size of a normal variable of `jitter` of its time. Both only
    delay: a step with them is never shorter than without.
    """

    skew_ms: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.skew_ms <= 1e6 or not 0 <= self.jitter <= 10 or self.seed < 0:
            raise TraincastError(
                f"skew {self.skew_ms:g} ms, jitter {self.jitter:g} and seed {self.seed} must not be negative "
                "(skew at most 1e6 ms, jitter at most 10)"
            )

    def applied(self, host: FloatArray, kernel: FloatArray, rank: int) -> tuple[FloatArray, FloatArray]:
        """Host and kernel seconds of one rank."""
        draw = np.random.default_rng((self.seed, rank))
        late = draw.uniform(0.0, 1e-3 * self.skew_ms)
        host = host * (1.0 + np.abs(draw.normal(0.0, self.jitter, len(host))))
        kernel = kernel * (1.0 + np.abs(draw.normal(0.0, self.jitter, len(kernel))))
        host[:1] += late
        return host, kernel

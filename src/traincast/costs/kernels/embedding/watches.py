"""What the stopwatches of public benchmarks add to the kernels of a lookup."""

from __future__ import annotations

from dataclasses import dataclass

WATCHES = ("", "training", "inference", "gradient")
"""What a stopwatch adds: nothing where calls follow each other in a loop; else the start of a lookup on the host, which
differs between training and inference, or the wait for a number of rows in the middle of a dense gradient."""


@dataclass(frozen=True, slots=True)
class Watches:
    """Seconds that a stopwatch adds to a whole call, by the words of `WATCHES`."""

    training: float = 1e-4
    inference: float = 2e-4
    gradient: float = 1.5e-4

    def of(self, word: str) -> float:
        """Seconds for one of `WATCHES`."""
        return float(getattr(self, word)) if word else 0.0

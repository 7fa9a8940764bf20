"""What each part of a prediction adds to the error of a step: its stages, from measured to wholly predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LEAST_ERROR = 1e-4  # errors below 0.01 % count as that: one that happens to be zero must not make the mean zero


def compute_gmae(errors: Sequence[float]) -> float:
    """Geometric mean of the absolute relative errors; those below 0.01 % count as that."""
    return math.exp(sum(math.log(max(abs(error), _LEAST_ERROR)) for error in errors) / len(errors)) if errors else 0.0


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """One step in seconds: `measured`, and `stages` in which more and more of it is predicted, by what was added last.

    The first stage is "walk" (replayed with measured times), the last one the full prediction.
    """

    number: int
    measured: float
    stages: Mapping[str, float]

    @property
    def replayed(self) -> float:
        """Seconds of the step simulated with measured times."""
        return self.stages["walk"]

    @property
    def full(self) -> float:
        """Seconds of the step wholly predicted."""
        return list(self.stages.values())[-1]

    @property
    def error(self) -> float:
        """Signed relative error of the full prediction."""
        return self.full / self.measured - 1.0 if self.measured else 0.0

    def compute_shares(self) -> dict[str, float]:
        """What each stage adds to the relative error; together they are the error."""
        moments = [self.measured, *self.stages.values()]
        changes = zip(self.stages, moments[1:], moments, strict=False)
        return {name: (after - before) / self.measured if self.measured else 0.0 for name, after, before in changes}

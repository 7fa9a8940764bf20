"""Where a law does not hold, and why: the physics of each exception. What is not listed is a violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from traincast.simulator.scenario.scenario import Scenario


@dataclass(frozen=True)
class LawException:
    """Scenarios (`holds`) in which a law may be broken by up to a factor (`most`), and the physics of it."""

    law: str
    most: float
    holds: Callable[[Scenario], bool]
    physics: str


EXCEPTIONS: tuple[LawException, ...] = ()


def find_exception(law: str, scenario: Scenario, factor: float) -> LawException | None:
    """The exception that explains a broken law, or None."""
    for known in EXCEPTIONS:
        if law.startswith(known.law) and factor <= known.most and known.holds(scenario):
            return known
    return None

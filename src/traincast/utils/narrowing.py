"""Which measurement would narrow the interval of a step most: one ranking for all who ask."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from traincast.utils.metrics import Z90

MEASURED = 0.03
"""Log-sigma of a time that was measured: what is left of the error of what takes that time."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a step's time is made of and that can be measured: its share of the time and the log-sigma of its
    prediction. Errors of one `group` go the same way and add up; those of different groups are independent. A part
    without a group has one of its own."""

    share: float
    spread: float
    group: Hashable = None

    @property
    def error(self) -> float:
        """Log-sigma of the step from this part."""
        return self.share * self.spread

    @property
    def removed(self) -> float:
        """What of that goes if it is measured."""
        return self.share * max(self.spread - MEASURED, 0.0)


def compute_half_width(parts: Mapping[Key, Part]) -> float:
    """Half the 90 % interval of the step, as a share of its time."""
    return _compute_width(sum(error**2 for error in _sum_errors_by_group(parts).values()))


def rank_by_remaining_width(parts: Mapping[Key, Part]) -> dict[Key, float]:
    """The half-width that is left when each part alone is measured, the one that narrows most first.

    >>> [name for name in ranked({"gemm": Part(0.8, 0.1), "host": Part(0.1, 0.4), "copy": Part(0.1, 0.03)})]
    ['gemm', 'host', 'copy']
    """
    errors = _sum_errors_by_group(parts)
    whole = sum(error**2 for error in errors.values())
    left = {
        key: _compute_width(whole - _compute_variance_reduction(errors[_group_key(key, part)], part))
        for key, part in parts.items()
    }
    return dict(sorted(left.items(), key=lambda item: item[1]))


def order_by_narrowing(parts: Mapping[Key, Part]) -> dict[Key, float]:
    """The order in which to measure, each time what narrows most of what is left; with the half-width left then."""
    errors = _sum_errors_by_group(parts)
    waiting: dict[Hashable, list[Key]] = defaultdict(list)  # of a group, the one that removes most at the end
    for key in sorted(parts, key=lambda key: (parts[key].removed, parts[key].error)):
        waiting[_group_key(key, parts[key])].append(key)
    order: dict[Key, float] = {}
    while waiting:
        best = max(waiting, key=lambda group: _compute_variance_reduction(errors[group], parts[waiting[group][-1]]))
        key = waiting[best].pop()
        errors[best] -= parts[key].removed
        order[key] = _compute_width(sum(error**2 for error in errors.values()))
        if not waiting[best]:
            del waiting[best]
    return order


def _group_key(key: Hashable, part: Part) -> Hashable:
    return ("alone", key) if part.group is None else ("group", part.group)


def _sum_errors_by_group(parts: Mapping[Key, Part]) -> dict[Hashable, float]:
    errors: dict[Hashable, float] = defaultdict(float)
    for key, part in parts.items():
        errors[_group_key(key, part)] += part.error
    return errors


def _compute_variance_reduction(error: float, part: Part) -> float:
    """By how much the variance of a step falls when a part of a group with this error is measured."""
    return error**2 - (error - part.removed) ** 2


def _compute_width(variance: float) -> float:
    return math.exp(Z90 * math.sqrt(max(variance, 0.0))) - 1

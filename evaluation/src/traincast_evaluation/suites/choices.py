"""Was the sharding that a prediction recommends the one to take? Tasks with every candidate predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from traincast_evaluation.suites.cases import Outcome

WITHIN_PERCENT = 10.0
"""A choice that costs no more than this over the best is right: the second paper's measure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One task: its candidates, the one with the shortest predicted step, and the one with the shortest measured step.
    `loss_percent` is what the chosen one costs over the best, `spread_percent` how far repeats of either are apart."""

    task: str
    candidates: int
    chosen: str
    best: str
    loss_percent: float
    spread_percent: float
    slowest_percent: float

    @property
    def right(self) -> bool:
        """Whether the choice is the best, or within the limit."""
        return self.loss_percent <= WITHIN_PERCENT

    def to_dict(self) -> dict[str, Any]:
        """The fields, and whether it is right."""
        return {**asdict(self), "right": self.right}


def make_choices(tasks: Mapping[str, Mapping[str, Outcome]]) -> list[Choice]:
    """The choice of every task of which at least two candidates were measured; by task and candidate."""
    return [_make_choice(task, outcomes) for task, outcomes in tasks.items() if len(outcomes) > 1]


def _make_choice(task: str, outcomes: Mapping[str, Outcome]) -> Choice:
    chosen = min(outcomes, key=lambda plan: outcomes[plan].predicted_ms)
    best = min(outcomes, key=lambda plan: outcomes[plan].case.measured_ms)
    spreads = [outcomes[plan].case.spread_percent or 0.0 for plan in (chosen, best)]
    return Choice(
        task=task,
        candidates=len(outcomes),
        chosen=chosen,
        best=best,
        loss_percent=_compute_loss(outcomes, chosen, best),
        spread_percent=max(spreads),
        slowest_percent=max(_compute_loss(outcomes, plan, best) for plan in outcomes),
    )


def _compute_loss(outcomes: Mapping[str, Outcome], plan: str, best: str) -> float:
    """What a candidate costs over the best, percent."""
    return 100 * (outcomes[plan].case.measured_ms / outcomes[best].case.measured_ms - 1)


def count_fixed_choice_right(tasks: Mapping[str, Mapping[str, Outcome]], plan: str) -> int:
    """In how many tasks one and the same candidate would have been right."""
    return sum(
        _compute_loss(outcomes, plan, min(outcomes, key=lambda one: outcomes[one].case.measured_ms)) <= WITHIN_PERCENT
        for outcomes in tasks.values()
        if len(outcomes) > 1 and plan in outcomes
    )


def write_choice_notes(
    made: Sequence[Choice], tasks: Mapping[str, Mapping[str, Outcome]], fixed: Sequence[str]
) -> list[str]:
    """What choosing by prediction brought, alongside always taking the same candidate."""
    if not made:
        return ["no task has two measured candidates: give more minutes"]
    right = sum(choice.right for choice in made)
    worst = max(made, key=lambda choice: choice.loss_percent)
    average = sum(choice.slowest_percent for choice in made) / len(made)
    lines = [
        f"choice right (best or within {WITHIN_PERCENT:.0f} %) in {right} of {len(made)} tasks; the worst choice costs "
        f"{worst.loss_percent:.1f} % over the best ({worst.task}: {worst.chosen} for {worst.best}, repeats spread "
        f"{worst.spread_percent:.1f} %); the slowest candidate costs {average:.0f} % on average"
    ]
    lines += [f"always '{plan}': right in {count_fixed_choice_right(tasks, plan)} of {len(made)}" for plan in fixed]
    return lines

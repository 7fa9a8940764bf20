"""The whole method on the machine at hand: steps predicted from its microbenchmarks, written down, then measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow, compute_error_row
from traincast_evaluation.suites.cases import LeftOut, Outcome
from traincast_evaluation.suites.choices import Choice, make_choices, write_choice_notes
from traincast_evaluation.suites.trial_runs import ISOLATED, Runs
from traincast_evaluation.trials.catalog import (
    RANDOM,
    Trial,
    draw_one_process_trials,
    draw_sharding_trials,
    draw_two_rank_trials,
    order_by_share,
)
from traincast_evaluation.trials.plans import BALANCED

Progress = Callable[[float], None]
_MOST_MINUTES = 24 * 60.0
VISITS = {"here": 3, "sharding": 2}
"""How often a step is built and measured, all others in between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HereOptions:
    """How an evaluation on this machine runs. `on` is the profile, "here" or its file; `minutes` None is as long as it
    takes; `tasks` None is as many random DLRMs as the suite has."""

    on: str = "here"
    minutes: float | None = None
    tasks: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes is not None and not 0 < self.minutes <= _MOST_MINUTES:
            raise TraincastError(f"`minutes={self.minutes:g}`; give a number above 0, up to {_MOST_MINUTES:.0f}")


@dataclass(frozen=True, kw_only=True)
class HereResult:
    """What an evaluation on this machine found; `choices` only of shardings."""

    summary: tuple[ErrorRow, ...]
    outcomes: tuple[Outcome, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    choices: tuple[Choice, ...] = ()


def evaluate_here(folder: Path, options: HereOptions, progress: Progress) -> HereResult:
    """Random and built-in DLRMs, Transformers and CNNs in one process; DLRMs and Transformers on two ranks."""
    counts = (40, 20) if options.tasks is None else (options.tasks, max(1, options.tasks // 2))
    trials = order_by_share(
        [
            *draw_one_process_trials(dlrms=counts[0], seed=options.seed),
            *draw_two_rank_trials(dlrms=counts[1], seed=options.seed),
        ],
        options.seed,
    )
    outcomes, left_out, notes = _run_trials("here", folder, trials, options, progress)
    return HereResult(summary=_summarise_trials("here", outcomes), outcomes=outcomes, left_out=left_out, notes=notes)


def evaluate_sharding(folder: Path, options: HereOptions, progress: Progress) -> HereResult:
    """Every candidate sharding of random tasks on two ranks, and whether the predicted best was the best."""
    trials = draw_sharding_trials(tasks=options.tasks or 20, seed=options.seed)
    outcomes, left_out, notes = _run_trials("sharding", folder, trials, options, progress)
    tasks = group_by_task(trials, outcomes)
    made = make_choices(tasks)
    notes = (*write_choice_notes(made, tasks, (BALANCED, "greedy by size", "naive")), *notes)
    return HereResult(
        summary=_summarise_trials("sharding", outcomes),
        outcomes=outcomes,
        left_out=left_out,
        notes=notes,
        choices=tuple(made),
    )


def group_by_task(trials: Sequence[Trial], outcomes: Sequence[Outcome]) -> dict[str, dict[str, Outcome]]:
    """Outcomes by task and candidate; only tasks of which every candidate was measured."""
    measured = {outcome.case.name: outcome for outcome in outcomes}
    tasks: dict[str, dict[str, Outcome | None]] = {}
    for trial in trials:
        tasks.setdefault(trial.name, {})[trial.plan] = measured.get(trial.key)
    return {
        task: {plan: outcome for plan, outcome in plans.items() if outcome is not None}
        for task, plans in tasks.items()
        if all(outcome is not None for outcome in plans.values())
    }


def _run_trials(
    name: str, folder: Path, trials: Sequence[Trial], options: HereOptions, progress: Progress
) -> tuple[tuple[Outcome, ...], tuple[LeftOut, ...], tuple[str, ...]]:
    from traincast_evaluation.suites.here_setting import load_here_setting

    here = load_here_setting(folder, options.on, ranks=any(trial.ranks > 1 for trial in trials))
    runs = Runs(
        name=name,
        folder=folder,
        trials=trials,
        predict=here.predictor.predict,
        basis=f"{here.basis}\nseed {options.seed}, {len(trials)} trials",
        nominal=here.nominal,
        minutes=float("inf") if options.minutes is None else options.minutes,
        clock=here.clock,
        visits=VISITS[name],
    )
    outcomes, left_out = runs.outcomes(progress)
    if not outcomes:
        reason = f", for the first one: {left_out[0].reason}" if left_out else "; give more minutes"
        raise TraincastError(f"evaluate {name}: no step was measured{reason}")
    visits = sum(one.visits for one in runs.record.measurements().values()) / len(outcomes)
    times = f"{len(outcomes)} of {len(trials)} steps measured, {visits:.1f} times each"
    notes = [f"{times}; predictions in '{runs.record.predictions_path}'"]
    return tuple(outcomes), tuple(left_out), (*notes, *here.notes)


def _summarise_trials(suite: str, outcomes: Sequence[Outcome]) -> tuple[ErrorRow, ...]:
    """All steps, then each group, alongside the baseline and the spread of repeats."""
    groups = sorted(
        {outcome.case.group for outcome in outcomes}, key=lambda group: (not group.startswith(RANDOM), group)
    )
    rows = [_summarise_trial_group(suite, "all: step", outcomes)]
    if len(groups) > 1:
        rows += [
            _summarise_trial_group(suite, group, [o for o in outcomes if o.case.group == group]) for group in groups
        ]
    return tuple(rows)


def _summarise_trial_group(suite: str, group: str, outcomes: Sequence[Outcome]) -> ErrorRow:
    row = compute_error_row(
        suite,
        group,
        [o.predicted_ms for o in outcomes],
        [o.case.measured_ms for o in outcomes],
        [o.case.name for o in outcomes],
        inside=np.array([o.covered for o in outcomes]),
        half_widths=np.array([o.half_width_percent for o in outcomes]),
    )
    alone = [abs(o.case.others[ISOLATED]) for o in outcomes if ISOLATED in o.case.others]
    spread = float(np.median([o.case.spread_percent or 0.0 for o in outcomes]))
    said = [f"MAPE: {ISOLATED} {sum(alone) / len(alone):.1f}"] if alone else []
    return replace(row, reference="; ".join([*said, f"repeats spread {spread:.1f}"]))

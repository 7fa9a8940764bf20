"""Trials predicted, written down, then run on this machine: what `evaluate here` and `evaluate sharding` share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traincast.calibration.bench.ranks import run_ranks
from traincast.costs.cpu.samples import CALM
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome
from traincast_evaluation.suites.here_files import Measured, Predicted, Record
from traincast_evaluation.trials.catalog import Trial

Progress = Callable[[float], None]
Predict = Callable[[Trial], Predicted]
_STEP_SECONDS = 1.5  # spent on the repetitions of one step, at each visit
_FEWEST_CALM = 3  # repetitions
RANK_MODULE = "traincast_evaluation.trials.rank"
"""What a rank runs."""
ISOLATED = "isolated ops summed"
"""The baseline: every op alone, in a warm cache, added up."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Trials of one evaluation: all are predicted by `predict`, and as many run as `minutes` allow, in their order.

    Each is built and measured up to `visits` times, all others in between: the same step, built anew minutes later,
    is in other pages of memory and alongside other neighbours, and takes some percent more or less.
    `basis` is what the predictions follow from, `nominal` the seconds of the reference kernel behind them. `clock` is
    "wall", or "busy" (processor time) where neighbours disturb the machine; ranks that wait are timed on the wall.
    """

    name: str
    folder: Path
    trials: Sequence[Trial]
    predict: Predict
    basis: str
    nominal: float
    minutes: float = float("inf")
    clock: str = "wall"
    visits: int = 3

    @property
    def record(self) -> Record:
        """Its files."""
        return Record(self.folder, self.name, self.basis)

    def outcomes(self, progress: Progress) -> tuple[list[Outcome], list[LeftOut]]:
        """Every trial that was measured, and those that cannot be predicted."""
        record, begin = self.record, time.monotonic()
        predictions, left_out = self._predictions(record, progress)
        self._measure(record, predictions, begin, progress)
        measured = record.measurements()
        outcomes = [
            make_trial_outcome(trial, predictions[trial.key], measured[trial.key], self.nominal, self.clock)
            for trial in self.trials
            if trial.key in predictions and trial.key in measured
        ]
        return outcomes, left_out

    def _predictions(self, record: Record, progress: Progress) -> tuple[dict[str, Predicted], list[LeftOut]]:
        """Those written down already, or all of them now."""
        known = record.read_predictions()
        if known:
            return known, []
        left_out = []
        for done, trial in enumerate(self.trials):
            try:
                known[trial.key] = self.predict(trial)
            except TraincastError as error:
                left_out.append(LeftOut(name=trial.key, group=name_trial_group(trial), reason=str(error)))
            progress(0.3 * (done + 1) / len(self.trials))
        record.write_predictions(known, self.trials, self.basis)
        return known, left_out

    def _measure(self, record: Record, predictions: dict[str, Predicted], begin: float, progress: Progress) -> None:
        """Trials that were not visited as often as wanted, visit after visit, until the time is over; in each, those
        of one process and of several by turns."""
        counts = {key: one.visits for key, one in record.measurements().items()}
        wanted = [trial for trial in self.trials if trial.key in predictions]

        def hear(result: dict[str, Any]) -> None:
            key = Trial.from_dict(result["trial"]).key
            record.add(key, Measured.of(result))
            counts[key] = counts.get(key, 0) + 1
            progress(0.3 + 0.7 * sum(counts.values()) / (self.visits * len(wanted)))

        for visit in range(self.visits):
            missing = [trial for trial in wanted if counts.get(trial.key, 0) <= visit]
            for ranks in sorted({trial.ranks for trial in missing}):
                left = 60 * self.minutes - (time.monotonic() - begin)
                share = left * sum(t.ranks == ranks for t in missing) / sum(t.ranks >= ranks for t in missing)
                jobs = [self._job(trial, isolated=visit == 0) for trial in missing if trial.ranks == ranks]
                if share > 0:
                    run_ranks(jobs, ranks, each=hear, seconds=share, module=RANK_MODULE)

    def _job(self, trial: Trial, *, isolated: bool) -> dict[str, Any]:
        job = {"trial": trial.to_dict(), "seconds": _STEP_SECONDS, "isolated": isolated and trial.ranks == 1}
        return {**job, "calm": CALM * self.nominal}


def name_trial_group(trial: Trial) -> str:
    """The group that a trial is counted in."""
    return f"{trial.group}, {trial.ranks} ranks" if trial.ranks > 1 else trial.group


def make_trial_outcome(trial: Trial, predicted: Predicted, measured: Measured, nominal: float, clock: str) -> Outcome:
    """A trial's prediction alongside its measurement, for a reference that takes `nominal` seconds."""
    ratios = measured.ratios(clock if trial.ranks == 1 else "wall")[_select_calm_repeats(measured, nominal, clock)]
    middle = float(np.median(ratios))
    others = {ISOLATED: 100 * (measured.isolated / middle - 1)} if measured.isolated > 0 else {}
    case = Case(
        name=trial.key,
        group=name_trial_group(trial),
        question=Scenario(workload=trial.key, on="here", gpus=trial.ranks),
        measured_ms=1e3 * nominal * middle,
        others=others,
        spread_percent=100 * 1.4826 * float(np.median(np.abs(ratios / middle - 1))),
    )
    return Outcome(
        case=case,
        predicted_ms=1e3 * predicted.seconds,
        low_ms=1e3 * predicted.low,
        high_ms=1e3 * predicted.high,
        active_ms=1e3 * predicted.seconds,
    )


def _select_calm_repeats(measured: Measured, nominal: float, clock: str) -> IntArray:
    """The repetitions alongside which the reference was as fast as on the calm machine, by number; where there are few,
    the calmest third."""
    beside = np.array(measured.reference_busy if clock == "busy" else measured.reference)
    fewest = max(_FEWEST_CALM, len(beside) // 3)
    return np.flatnonzero(beside <= max(CALM * nominal, np.sort(beside)[min(fewest, len(beside)) - 1]))

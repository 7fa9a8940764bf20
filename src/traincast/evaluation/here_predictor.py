"""Trials predicted from what was measured of this machine: its ops one by one, and gloo between its ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from traincast.calibration.op_costs import OpCosts, op_costs
from traincast.calibration.profile import Profile
from traincast.calibration.step import predict_serial
from traincast.errors import TraincastError
from traincast.evaluation.here_files import Predicted
from traincast.quantiles import Z90
from traincast.trials.catalog import Trial
from traincast.trials.gloo import GlooCurves
from traincast.trials.together import RankPlan, rank_plan, step_seconds
from traincast.trials.workloads import TrialWorkload, trial_workload


@dataclass(frozen=True, slots=True)
class HerePredictor:
    """Predicts trials on the machine of a profile; those of several ranks need the curves of `gloo`."""

    profile: Profile
    gloo: GlooCurves | None = None

    def predict(self, trial: Trial) -> Predicted:
        """Seconds of one step of a trial, and their 90 % interval."""
        captured = trial_workload(trial)
        if trial.ranks > 1:
            return self._together(captured, trial.ranks)
        answer = predict_serial(captured.workload, self.profile, captured.access[0])
        return Predicted(answer.iteration, *answer.interval)

    def _together(self, captured: TrialWorkload, ranks: int) -> Predicted:
        if self.gloo is None:
            raise TraincastError("gloo's collectives were not measured here; measure them first")
        costs = [op_costs(captured.program(rank), self.profile, captured.access[rank]) for rank in range(ranks)]
        plans = [rank_plan(captured.program(rank), cost.seconds) for rank, cost in enumerate(costs)]
        seconds = step_seconds(plans, self.gloo.cost)
        return _with_interval(seconds, self._spread(costs, plans, seconds))

    def _spread(self, costs: Sequence[OpCosts], plans: Sequence[RankPlan], seconds: float) -> float:
        """Relative deviation of a step: that of the busiest rank's ops, and of what is exchanged."""
        assert self.gloo is not None
        computing = max(cost.deviation for cost in costs)
        exchanging = 0.0
        for number in range(len(plans[0].exchanges)):
            met = [plan.exchanges[number] for plan in plans]
            exchanging += (self.gloo.sigma(met) * self.gloo.cost(met).seconds) ** 2
        return math.hypot(computing, math.sqrt(exchanging)) / seconds


def _with_interval(seconds: float, spread: float) -> Predicted:
    factor = math.exp(Z90 * spread)
    return Predicted(seconds, seconds / factor, seconds * factor)

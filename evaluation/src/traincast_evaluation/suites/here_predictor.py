"""Trials predicted from what was measured of this machine: its ops one by one, and what its ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.costs.cpu.profile import Profile, make_machine_platform
from traincast.simulator.cpu.predict import predict_on_machine
from traincast_evaluation.suites.here_files import Predicted
from traincast_evaluation.trials.catalog import Trial
from traincast_evaluation.trials.workloads import build_trial_workload


@dataclass(frozen=True, slots=True)
class HerePredictor:
    """Predicts trials on the machine of a profile."""

    profile: Profile

    def predict(self, trial: Trial) -> Predicted:
        """Seconds of one step of a trial, and their 90 % interval."""
        captured = build_trial_workload(trial)
        result = predict_on_machine(captured.workload, make_machine_platform(self.profile), captured.access)
        return Predicted(result.iteration, *result.interval)

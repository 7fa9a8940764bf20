"""One rank that runs trials: `python -m traincast_evaluation.trials.rank FOLDER` in torchrun's environment."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traincast.calibration.bench.device import Device, Reference
from traincast.calibration.bench.rank import serve_jobs
from traincast_evaluation.trials.catalog import Trial
from traincast_evaluation.trials.isolated import measure_isolated_seconds
from traincast_evaluation.trials.steps import make_trial_step


def trial_work(job: dict[str, Any], rank: int, ranks: int, _: Device) -> Callable[[], object]:
    """The step of a job's trial."""
    trial = Trial.from_dict(job["trial"])
    return make_trial_step(trial)(trial.batch_size, rank=rank, world_size=ranks)


def ops_alone(job: dict[str, Any], step: Callable[[], object], reference: Reference) -> dict[str, float]:
    """Where a job asks for it, the step's ops one by one, in units of the reference before and after."""
    if not job.get("isolated"):
        return {}
    before = reference.seconds().busy
    seconds = measure_isolated_seconds(step)
    return {"isolated": seconds / math.sqrt(before * reference.seconds().busy)}


if __name__ == "__main__":
    serve_jobs(Path(sys.argv[1]), {"trial": trial_work}, ops_alone)

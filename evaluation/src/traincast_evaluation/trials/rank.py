"""One rank that runs trials: `python -m traincast_evaluation.trials.rank FOLDER` in torchrun's environment."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traincast.calibration.bench.device import Device
from traincast.calibration.bench.rank import serve
from traincast.calibration.bench.timing import Reference
from traincast_evaluation.trials.catalog import Trial
from traincast_evaluation.trials.isolated import isolated_seconds
from traincast_evaluation.trials.steps import make_step_of


def trial_work(job: dict[str, Any], rank: int, ranks: int, _: Device) -> Callable[[], object]:
    """The step of a job's trial."""
    trial = Trial.from_dict(job["trial"])
    return make_step_of(trial)(trial.batch_size, rank=rank, world_size=ranks)


def ops_alone(job: dict[str, Any], step: Callable[[], object], reference: Reference) -> dict[str, float]:
    """Where a job asks for it, the step's ops one by one, in units of the reference before and after."""
    if not job.get("isolated"):
        return {}
    before = reference.seconds().busy
    seconds = isolated_seconds(step)
    return {"isolated": seconds / math.sqrt(before * reference.seconds().busy)}


if __name__ == "__main__":
    serve(Path(sys.argv[1]), {"trial": trial_work}, ops_alone)

"""One rank that runs a step by name, as `python -m traincast.questions.rank FOLDER` with torchrun's variables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traincast.benching.device import Device
from traincast.benching.rank import serve
from traincast.questions.ranks import ranks_step
from traincast.questions.variant import Variant


def step_work(job: dict[str, Any], rank: int, ranks: int, device: Device) -> Callable[[], object]:
    """The step of a job."""
    step = ranks_step(job["step"], Variant(**job["variant"]), ranks, device.kind)
    made: Callable[[], object] = step.make_step(step.batch_size, rank=rank, world_size=ranks)
    return made


if __name__ == "__main__":
    serve(Path(sys.argv[1]), {"step": step_work})

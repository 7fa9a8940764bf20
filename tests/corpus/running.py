"""Captures and predicts set-ups of the corpus, and says how each came out."""

from __future__ import annotations

import time
import traceback
import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from tests.corpus.setups import SETUPS, Setup
from tests.corpus.torchvision_ops import define_missing
from traincast.utils.errors import TraincastError

MODULES = ("hugging_face", "vision", "recommenders", "loops", "habits", "ranks")


def load() -> dict[str, Setup]:
    define_missing()
    for name in MODULES:
        import_module(f"tests.corpus.{name}")
    return SETUPS


@dataclass(frozen=True)
class Outcome:
    """How one set-up came out: `state` is works, refused, failed or skipped."""

    name: str
    state: str
    why: str = ""
    sizes: str = ""
    ops: int = 0
    milliseconds: float = 0.0
    seconds: float = 0.0  # of the capture
    trace: str = ""


def run(setup: Setup, *, on: str = "a100-80gb", rebatch: bool = True) -> Outcome:
    """Captures the set-up at its sizes and predicts it."""
    import traincast
    from traincast.capturing import capture_distributed, capture_step

    missing = [name for name in setup.needs if find_spec(name) is None]
    if missing:
        return Outcome(setup.name, "skipped", f"{missing[0]} is not installed")
    begun = time.perf_counter()
    how = {"batch_size": setup.batch, "seq_len": setup.seq_len, "name": setup.name, "rebatch": rebatch}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if setup.gpus:
                workload = capture_distributed(setup.build, world_size=setup.gpus, **how)
            else:
                workload = capture_step(setup.build, **how)
        seconds = time.perf_counter() - begun
        result = traincast.predict(workload, on=on)
    except TraincastError as error:
        return Outcome(
            setup.name, "refused", str(error), seconds=time.perf_counter() - begun, trace=traceback.format_exc()
        )
    except Exception as error:
        return Outcome(setup.name, "failed", f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    rigid = workload.programs[0].rigid
    return Outcome(
        setup.name, "works", rigid, "one" if rigid else "any", sum(p.num_ops for p in workload.programs),
        result.iteration * 1e3, seconds,
    )  # fmt: skip

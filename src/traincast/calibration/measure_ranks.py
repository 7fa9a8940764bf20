"""A step that several ranks of this machine train together: DLRMs hybrid parallel, other models under DDP.

Run as a module with torchrun's environment variables it is one of those ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.calibration.measure import Source, check_sizes, find_named_model, load_definitions
from traincast.ir.workload import Workload
from traincast.models.dlrm.config import DlrmConfig
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.calibration.bench.device import Device
    from traincast.calibration.bench.measure import Measured

MOST_RANKS = 64
"""More than one machine has GPUs: a larger number is a mistake."""


@dataclass(frozen=True, slots=True)
class RanksStep:
    """A step of several ranks: `make_step(batch_size[, seq_len], *, rank, world_size)`. `access[r]` says which rows the
    lookups of rank r want."""

    name: str
    batch_size: int
    seq_len: int
    make_step: Callable[..., Any]
    access: tuple[tuple[str, ...], ...]


def make_rank_step(
    source: Source, variant: Scenario, ranks: int, device: str = "cpu", *, drawn: bool = True
) -> RanksStep:
    """The step of a model on this many ranks; without `drawn` it is only captured. Needs torch."""
    if not 2 <= ranks <= MOST_RANKS:
        raise TraincastError(f"`gpus` is {ranks}; give an integer number of ranks from 2 to {MOST_RANKS}")
    if not variant.trains_eagerly or variant.optimizer == "none":
        raise TraincastError("ranks train together; leave out `mode`, `compiled` and `optimizer='none'`")
    name = str(source)
    if not isinstance(source, DlrmConfig) and (callable(source) or ":" in name):
        return _load_rank_function(source, variant, ranks)
    model = find_named_model(source)
    if isinstance(model, DlrmConfig) and drawn and device == "cuda":
        raise TraincastError(
            "DLRMs of several ranks are run here on CPUs; with `device='cuda'` give a model that is trained under DDP, "
            "or FILE.py:FUNCTION"
        )
    step: RanksStep = load_definitions(model).make_many_ranks_step(model, variant, ranks, device, drawn=drawn)
    return step


def _load_rank_function(source: str | Path | Callable[..., Any], variant: Scenario, ranks: int) -> RanksStep:
    from functools import partial

    from traincast.capturing.distributed import check_takes_ranks
    from traincast.capturing.from_file import load_function

    function = source if callable(source) else load_function(str(source))
    name = getattr(source, "__name__", "step") if callable(source) else Path(str(source).rpartition(":")[0]).stem
    check_takes_ranks(function)
    made = function if variant.seq_len is None else partial(function, seq_len=variant.seq_len)
    return RanksStep(name, variant.batch_size or 32, variant.seq_len or 0, made, ((),) * ranks)


def capture_ranks(source: Source, variant: Scenario, ranks: int) -> tuple[Workload, tuple[tuple[str, ...], ...]]:
    """A step of several ranks as CPUs run it, without running it, and which rows each rank's lookups want."""
    from traincast.capturing.distributed import capture_distributed

    step = make_rank_step(source, variant, ranks, device="cuda", drawn=False)
    workload = capture_distributed(
        step.make_step, world_size=ranks, batch_size=step.batch_size, name=step.name, rebatch=False, runs_on="cpu"
    )
    return workload, step.access


def measure_ranks(
    source: Source,
    variant: Scenario,
    ranks: int,
    *,
    device: str,
    repeats: int,
    seconds: float,
    clock: str,
    nominal: float | None,
    trace: Path | None = None,
) -> Measured:
    """The step, run by processes that this one launches as torchrun would; of the slowest rank, on the wall's clock."""
    import numpy as np

    from traincast.calibration.bench.device import Series, summarise_series
    from traincast.calibration.bench.measure import MOST_REPEATS, Measured
    from traincast.calibration.bench.parts import count_possible_ranks
    from traincast.calibration.bench.ranks import run_ranks
    from traincast.calibration.bench.store import open_device

    check_sizes(variant, seconds)
    if trace is not None:
        raise TraincastError("a trace is of one process; leave out `trace_out`")
    if callable(source) or isinstance(source, DlrmConfig):
        raise TraincastError("ranks are processes of their own: give a model's name, a YAML file or FILE.py:FUNCTION")
    if clock != "wall":
        raise TraincastError("ranks wait for each other, which is no processor time; leave out `clock`")
    if not 3 <= repeats <= MOST_REPEATS:
        raise TraincastError(f"`repeats` is {repeats}; give 3 to {MOST_REPEATS}")
    opened = open_device(device)
    places = count_possible_ranks(opened, most=ranks)
    if device == "cuda" and places < ranks:
        raise TraincastError(f"`gpus` is {ranks} and this machine has {places}; give as many as there are")
    step = make_rank_step(source, variant, ranks, device)
    job = {"step": str(source), "variant": variant.given(), "seconds": seconds, "most": repeats}
    on_result: list[dict[str, Any]] = []
    run_ranks([job], ranks, each=on_result.append, module=__name__, device=device)
    series = Series(*(np.array(on_result[0][name]) for name in ("step", "busy", "reference", "reference_busy")))
    return Measured(
        workload=step.name, batch_size=step.batch_size, seq_len=step.seq_len, identity=opened.identity(),
        clock="wall", summary=summarise_series(series, "wall", nominal), series=series, ranks=ranks,
        notes=(*series.drift(), *([f"{ranks} ranks took turns on {places} cores"] if places < ranks else [])),
    )  # fmt: skip


def make_step_work(job: dict[str, Any], rank: int, ranks: int, device: Device) -> Callable[[], object]:
    """The step of a job, as one rank runs it."""
    step = make_rank_step(job["step"], Scenario(**job["variant"]), ranks, device.kind)
    made: Callable[[], object] = step.make_step(step.batch_size, rank=rank, world_size=ranks)
    return made


if __name__ == "__main__":
    from traincast.calibration.bench.rank import serve_jobs

    serve_jobs(Path(sys.argv[1]), {"step": make_step_work})

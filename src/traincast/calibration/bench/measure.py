"""A real training step, timed on this machine, and what disturbed the timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from traincast.calibration.bench.device import (
    BUSY_NEIGHBOURS,
    DRIFTED,
    Device,
    Identity,
    Reference,
    Series,
    Summary,
    compute_drift,
    run_series,
    run_timed,
    summarise_series,
)
from traincast.costs.cpu.collectives import is_collective
from traincast.costs.cpu.samples import CALM, Sample, select_calm_samples
from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import write_bytes
from traincast.utils.results import Records, Result

Step = Callable[[], object]
MOST_REPEATS = 10_000
_BLOCK_SECONDS, _MOST_IN_A_BLOCK = 0.05, 20  # as of ranks that work together
_WARM_UPS = 2  # the first step makes optimizer state and loads kernels, the second fills the allocator's cache


@dataclass(frozen=True, repr=False, kw_only=True)
class Measured(Result):
    """One step as it ran here. Seconds; `clock` says by which clock ("wall", or the thread's "busy" time). As many as
    `ranks` ran it together, each at `batch_size`."""

    workload: str
    batch_size: int
    seq_len: int
    identity: Identity
    clock: str
    summary: Summary
    series: Series
    notes: tuple[str, ...]
    trace: str = ""
    ranks: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds, and what they were measured on."""
        figures = asdict(self.summary)
        times = {f"{name}_ms": 1e3 * figures[name] for name in ("median", "corrected", "low", "high", "reference")}
        return {
            "workload": self.workload,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len or None,
            "ranks": self.ranks,
            "device": self.identity.to_dict(),
            "clock": self.clock,
            "repeats": self.summary.repeats,
            **times,
            "spread": self.summary.spread,
            "wall_median_ms": 1e3 * float(np.median(self.series.wall)),
            "busy_median_ms": 1e3 * float(np.median(self.series.busy)),
            "trace": self.trace or None,
            "notes": list(self.notes),
        }

    def headline(self) -> str:
        """Median, corrected figure with its interval, and what disturbed the run."""
        s = self.summary
        together = f"{self.ranks} ranks, each " if self.ranks > 1 else ""
        lines = [
            f"{self.workload}, {together}batch {self.batch_size}, on {self.identity.name} "
            f"({self.identity.threads} thread{' a rank' if self.ranks > 1 else ''})",
            f"median {1e3 * s.median:.2f} ms ({self.clock} time, {s.repeats} steps, spread {s.spread:.1%})",
            f"drift-corrected {1e3 * s.corrected:.2f} ms (90 % interval of the median {1e3 * s.low:.2f} to "
            f"{1e3 * s.high:.2f}), for a reference of {1e3 * s.reference:.3f} ms",
        ]
        return "\n".join([*lines, *(["trace: " + self.trace] if self.trace else []), *self.notes])

    def records(self) -> Records:
        """Table "repetitions": one row per step, in the order they ran."""
        columns = zip(
            self.series.wall, self.series.busy, self.series.reference_wall, self.series.reference_busy, strict=True
        )
        names = ("wall_ms", "busy_ms", "reference_wall_ms", "reference_busy_ms")
        return {"repetitions": [dict(zip(names, (1e3 * float(v) for v in row), strict=True)) for row in columns]}


def measure_step(
    make_step: Callable[[], Step],
    device: Device,
    *,
    name: str,
    batch_size: int,
    seq_len: int = 0,
    repeats: int = 30,
    seconds: float = 20.0,
    clock: str = "wall",
    nominal: float | None = None,
    trace: Path | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Measured:
    """Builds the step and times it, the reference between every two repetitions; see `Series` and `Summary`.

    `nominal` is how long the reference takes on the machine whose seconds are wanted (a profile's), None: here and now.
    `trace` receives a Kineto trace of one more step.
    """
    if not 3 <= repeats <= MOST_REPEATS:
        raise TraincastError(f"`repeats` is {repeats}; give 3 to {MOST_REPEATS}")
    with _catch_step_errors(name, device):
        before = _count_gpu_allocations()
        step = make_step()
        if not callable(step):
            raise TraincastError(f"{name} gave a {type(step).__name__}, no step: let it return a function to call")
        for _ in range(_WARM_UPS):
            step()
        device.synchronise()
        _check_place(name, device, before)
        many = _choose_steps_per_block(step, device)
        series = run_series(
            device, Reference(device), _repeat_step(step, many), repeats=repeats, seconds=seconds, progress=progress
        ).of_each(many)
        if trace is not None:
            record_trace(step, device, trace)
    return Measured(
        workload=name, batch_size=batch_size, seq_len=seq_len, identity=device.identity(), clock=clock,
        summary=summarise_series(series, clock, nominal), series=series,
        notes=(*series.notes(), *filter(None, [device.neighbours()])),
        trace="" if trace is None else str(trace),
    )  # fmt: skip


def _check_place(name: str, device: Device, before: int) -> None:
    """Rejects a step that ran elsewhere than where it is timed: its time would be that of something else."""
    after = _count_gpu_allocations()
    if device.kind == "cuda" and 0 < after == before:
        raise TraincastError(f"{name} put nothing on the GPU; let it make its tensors there, or give `device='cpu'`")
    if device.kind == "cpu" and after > before:
        raise TraincastError(f"{name} runs on a GPU, and this would time its launches alone; give `device='cuda'`")


def _count_gpu_allocations() -> int:
    """How many tensors this process has put on its current GPU so far; 0 where the allocator does not say."""
    import torch

    started: Any = torch.cuda.is_initialized
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0)) if started() else 0


def _choose_steps_per_block(step: Step, device: Device) -> int:
    """On a GPU this many steps run without waiting in between, as in training: the host is ahead of the GPU there."""
    if device.kind == "cpu":
        return 1
    once = run_timed(device, step).wall
    return max(1, min(_MOST_IN_A_BLOCK, math.ceil(_BLOCK_SECONDS / max(once, 1e-6))))


def _repeat_step(step: Step, many: int) -> Step:
    def run() -> None:
        for _ in range(many):
            step()

    return step if many == 1 else run


def record_trace(step: Step, device: Device, path: Path) -> None:
    """One step under PyTorch's profiler, written as the Chrome trace that `traincast trace` reads. A step before it
    lets the profiler begin: on a GPU its first moments take long, and kernels may be missing."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.kind == "cuda" else [])]
    with TemporaryDirectory() as folder:  # the profiler writes in place, and to plain names only
        draft = Path(folder) / "trace.json"

        def keep(recorded: Any) -> None:
            recorded.export_chrome_trace(str(draft))

        once = schedule(wait=0, warmup=1, active=1, repeat=1)
        with profile(activities=activities, record_shapes=True, schedule=once, on_trace_ready=keep) as recorder:
            for _ in range(2):
                step()
                device.synchronise()
                recorder.step()
        write_bytes(path, draft.read_bytes())


@contextmanager
def _catch_step_errors(name: str, device: Device) -> Any:
    """What goes wrong in a user's step, in one line."""
    import torch

    try:
        yield
    except TraincastError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        notes = " ".join(str(error).split())[:120]
        raise TraincastError(
            f"{name} needs more memory than the {device.kind} has ({notes}); give a smaller `batch_size`"
        ) from error
    except Exception as error:
        notes = " ".join(str(error).split())[:300]
        remedy = "; this runs on a CPU: let the step take its device from torch.cuda.is_available()" * (
            device.kind == "cpu" and "cuda" in notes.lower()
        )
        raise TraincastError(f"{name} does not run here: {type(error).__name__}: {notes}{remedy}") from error


_FEWEST = 8  # samples that a run must have for anything to be said of it
_SPREAD = 0.25  # of repetitions, beyond which a sample is not used


def note_disturbances(samples: Sequence[Sample], clocks_mhz: tuple[float, float]) -> list[str]:
    """What to say of the samples of one run, in their order; `clocks_mhz` are the device's before and after it."""
    notes = []
    before, after = clocks_mhz
    if before > 0 and after > 0 and max(before, after) > DRIFTED * min(before, after):
        notes.append(f"the clock was {before:.0f} MHz before and {after:.0f} after: lock it, or let the device cool")
    single = [sample for sample in samples if not is_collective(sample.signature) and not sample.plan]
    if len(single) < _FEWEST:
        return notes
    waited = float(np.median([sample.reference_wall / max(sample.reference_busy, 1e-12) for sample in single]))
    if waited > BUSY_NEIGHBOURS:
        notes.append(
            f"other programs had the processor for {1 - 1 / waited:.0%} of the time; end them, then measure anew"
        )
    drift = compute_drift(np.array([sample.reference_busy for sample in single]))
    if drift > DRIFTED:
        notes.append(
            f"the reference drifted by {drift - 1:.0%} (throttling or neighbours); samples have it divided out"
        )
    slow = len(single) - len(select_calm_samples(single))
    if slow:
        notes.append(
            f"{slow} of {len(single)} samples were taken while the reference was {CALM - 1:.0%} or more above that of "
            "the calm machine (neighbours) and will not be used"
        )
    disturbed = sum(sample.spread > _SPREAD for sample in single)
    if disturbed:
        notes.append(f"{disturbed} of {len(single)} samples spread by more than {_SPREAD:.0%} and will not be used")
    return notes


JOBS = "jobs.json"
"""What ranks are to do, one job after the other."""
RESULTS = "results.jsonl"
"""What the first rank writes there, a line a job."""
COLLECTIVE = "collective"
"""Where ranks find each other: a file, since a port that was free may be taken by the time they listen on it."""
LAUNCHER = "TRAINCAST_LAUNCHER"
"""The environment variable with the process that launched a rank."""

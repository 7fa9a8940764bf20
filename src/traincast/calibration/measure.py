"""A step to run on this machine, by name or file, and its measurement."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.ir.workload import MAX_BATCH
from traincast.models.catalog import list_models
from traincast.models.dlrm.config import STUDY_DLRMS, DlrmConfig
from traincast.simulator.scenario.dlrm_file import read_dlrm
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError, make_unknown_error
from traincast.utils.plugins import DEFINITIONS, require_plugin

if TYPE_CHECKING:
    from traincast.calibration.bench.measure import Measured

_MEMORY_SHARE = 0.8  # of what is free that tables may take
Source = str | Path | Callable[..., Any] | DlrmConfig
"""A built-in model by name, a DLRM in YAML or as a `DlrmConfig`, FILE.py:FUNCTION, or a function `make_step`."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A step that can be run, at a batch size and a sequence length (0: it has none); bytes of its tables."""

    name: str
    batch_size: int
    seq_len: int
    build: Callable[[int, int], Callable[[], Any]]
    tables: int = 0

    def make_step(self) -> Callable[[], Any]:
        """A fresh model, optimizer and batch, as a callable that runs one iteration."""
        return self.build(self.batch_size, self.seq_len)


def make_runnable(source: Source, variant: Scenario, device: str = "cpu", *, drawn: bool = True) -> Runnable:
    """The step of a model as it runs on a device of this machine, or, without `drawn`, as it is only captured: that
    reads no values. Needs torch."""
    name = str(source)
    if not isinstance(source, DlrmConfig) and (callable(source) or ":" in name):
        return _load_function(source, variant)
    if name.endswith(".tc"):
        raise TraincastError(f"{name} holds a captured step, which cannot be run; give FILE.py:FUNCTION or a model")
    model = find_named_model(source)
    step: Runnable = load_definitions(model).make_one_rank_step(model, variant, device, drawn=drawn)
    return step


def find_named_model(source: Source) -> str | DlrmConfig:
    """A DLRM, built in, in YAML or as it is; any other model by its name."""
    if isinstance(source, DlrmConfig):
        return source
    name = str(source)
    return read_dlrm(Path(name)) if name.endswith((".yaml", ".yml")) else STUDY_DLRMS.get(name, name)


def load_definitions(model: str | DlrmConfig) -> Any:
    """What writes steps of built-in models and of DLRMs in PyTorch; a model that nobody knows is rejected."""
    name = model if isinstance(model, str) else model.name
    if isinstance(model, str) and name not in {info.name for info in list_models()}:
        known = [info.name for info in list_models()]
        raise make_unknown_error(
            "model", name, known, "See 'traincast models', or give a DLRM in YAML or FILE.py:FUNCTION."
        )
    return require_plugin(DEFINITIONS, "steps", f"{name} as a PyTorch model (FILE.py:FUNCTION is your own)")


def _load_function(source: str | Path | Callable[..., Any], variant: Scenario) -> Runnable:
    from traincast.capturing.from_file import load_function
    from traincast.capturing.step import adapt_to_sizes

    if callable(source):
        function, name = source, getattr(source, "__name__", "step")
    else:
        function, name = load_function(str(source)), Path(str(source).rpartition(":")[0]).stem
    return Runnable(name, variant.batch_size or 32, variant.seq_len or 0, adapt_to_sizes(function, variant.seq_len))


def make_slug(source: Source) -> str:
    """A short name of a step that any file may have.

    >>> slug("models/mine.py:make_step")
    'mine-py-make_step'
    """
    name = source.name if isinstance(source, DlrmConfig) else getattr(source, "__name__", None) or str(source)
    return re.sub(r"[^A-Za-z0-9_]+", "-", Path(name).name).strip("-")[:60] or "step"


def check_sizes(variant: Scenario, seconds: float) -> None:
    """Rejects sizes and times that cannot be meant."""
    for what, value in (("batch_size", variant.batch_size), ("seq_len", variant.seq_len)):
        if value is not None and not 1 <= value <= MAX_BATCH:
            raise TraincastError(f"`{what}` is {value}; give an integer from 1 to {MAX_BATCH}")
    if not 0 < seconds < inf:
        raise TraincastError(f"`seconds` is {seconds:g}; give a positive number")


def measure_here(
    source: Source,
    variant: Scenario,
    *,
    device: str = "cpu",
    repeats: int = 30,
    seconds: float = 20.0,
    clock: str = "wall",
    nominal: float | None = None,
    trace: Path | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Measured:
    """The step, run here by one process; see `benching.measure.measure_step`."""
    from traincast.calibration.bench.device import CLOCKS
    from traincast.calibration.bench.measure import measure_step
    from traincast.calibration.bench.store import open_device

    check_sizes(variant, seconds)
    if clock not in CLOCKS:
        raise make_unknown_error("clock", clock, CLOCKS, f"Choose from {', '.join(CLOCKS)}.")
    opened = open_device(device)
    step = make_runnable(source, variant, device)
    free = opened.free_bytes()
    if step.tables > _MEMORY_SHARE * free:
        raise TraincastError(
            f"the tables of {step.name} take {step.tables / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on the "
            f"{device}; describe a smaller model in YAML"
        )
    return measure_step(
        step.make_step, opened, name=step.name, batch_size=step.batch_size, seq_len=step.seq_len, repeats=repeats,
        seconds=seconds, clock=clock, nominal=nominal, trace=trace, progress=progress,
    )  # fmt: skip

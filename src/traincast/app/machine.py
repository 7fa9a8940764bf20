"""The Python calls about the machine at hand: measured, fitted, predicted. They are calls of `traincast.app.api`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from traincast.app.keywords import spell_out_keywords

if TYPE_CHECKING:
    from traincast.app.keywords import VariantFields
    from traincast.calibration.bench.measure import Measured
    from traincast.calibration.bench.selfcheck import SelfCheck
    from traincast.calibration.campaign import Benched
    from traincast.calibration.here import Calibrated
    from traincast.calibration.measure import Source as Step
    from traincast.calibration.refine import Refined
    from traincast.simulator.scenario.scenario import Scenario

Progress = Callable[[float], None]
"""Hears the fraction that is done."""


def _ignore_progress(_: float) -> None:
    """Ignores progress."""


def _make_variant(fields: VariantFields) -> Scenario:
    """The variant of a step that is run: in fp32 unless another arithmetic is named."""
    from traincast.simulator.scenario.fields import make_scenario

    return make_scenario({"dtype": "fp32", **fields})


@spell_out_keywords
def measure(
    step: Step,
    *,
    device: str = "cpu",
    repeats: int = 30,
    seconds: float = 20.0,
    clock: str = "wall",
    nominal: float | None = None,
    trace_out: str | Path | None = None,
    gpus: int = 1,
    progress: Progress = _ignore_progress,
    **variant: Unpack[VariantFields],
) -> Measured:
    """Runs a real training step on this machine, interleaved with a reference kernel, and says how long it takes.

    `step` is a built-in model, a DLRM in YAML or as a `DlrmConfig`, "FILE.py:FUNCTION" or a function (`capture` says
    of which form). It is run up to `repeats` times within about `seconds`. `clock` is "wall", or "busy" (the time of
    this thread alone). `nominal` is how long the reference takes where the corrected figure is to hold (default: here
    and now). `trace_out` receives a Kineto trace of one more step; on a GPU there is one in any case. With `gpus` as
    many processes train together (a DLRM hybrid parallel, others under DDP), over gloo on a CPU, one thread each, or
    NCCL. Needs torch; variants as in `predict`.
    """
    from traincast.calibration.measure import make_slug
    from traincast.calibration.measure import measure_here as run
    from traincast.costs.cpu.profile import get_profile_home

    trace = None if trace_out is None else Path(trace_out)
    if trace is None and device == "cuda" and gpus == 1:
        trace = get_profile_home() / f"step-{make_slug(step)}.json"
        trace.parent.mkdir(parents=True, exist_ok=True)
    if gpus != 1:
        from traincast.calibration.measure_ranks import measure_ranks

        return measure_ranks(
            step, _make_variant(variant), gpus, device=device, repeats=repeats, seconds=seconds, clock=clock,
            nominal=nominal, trace=trace,
        )  # fmt: skip
    return run(
        step, _make_variant(variant), device=device, repeats=repeats, seconds=seconds, clock=clock, nominal=nominal,
        trace=trace, progress=progress,
    )  # fmt: skip


@spell_out_keywords
def bench(
    *,
    device: str = "cpu",
    budget: str = "10m",
    store: str | Path | None = None,
    workload: Step | None = None,
    seed: int = 0,
    dry_run: bool = False,
    clock_mhz: float = 0.0,
    progress: Progress = _ignore_progress,
    covered: Callable[[str], None] = lambda _: None,
    **variant: Unpack[VariantFields],
) -> Benched:
    """Measures this machine: microbenchmarks into a store (a folder; default: one per device), for the time `budget`.

    With a `workload` (as `measure` takes it, in a variant) only its own ops are measured, most valuable first, and
    `covered` hears after each minute, in words, how much of its time is. A `dry_run` says what would be measured.
    `clock_mhz` is the clock that a GPU was locked to, a part of its identity. A run that was interrupted goes on where
    it stopped; two at a time do not write to one store. Needs torch and polars.
    """
    from traincast.calibration.campaign import run_campaign as run

    return run(
        device=device, budget=budget, store=None if store is None else Path(store), workload=workload,
        variant=_make_variant(variant), seed=seed, dry_run=dry_run, clock_mhz=clock_mhz, progress=progress,
        covered=covered,
    )  # fmt: skip


def self_check(device: str = "cpu") -> SelfCheck:
    """Tries every part that `bench` needs of a device once; the report says which failed. Needs torch."""
    from traincast.calibration.bench.selfcheck import check_device
    from traincast.calibration.bench.store import open_device

    return check_device(lambda: open_device(device), device)


def fit_store(store: str | Path, *, out: str | Path | None = None, clock: str = "wall") -> Calibrated:
    """Fits the profile of a machine from the store that `bench` filled, and writes it to the file `out` (default: where
    `on="here"` looks). The result has the errors on a held-out fifth (percent). Needs polars."""
    from traincast.calibration.here import fit_store as run

    return run(Path(store), None if out is None else Path(out), clock)


def refine_from_traces(*files: str | Path, platform: str, out: str | Path | None = None) -> Refined:
    """Corrects the shipped models of a built-in GPU and its host by traced runs of your own, and writes a platform
    (`out`, .toml) that predictions take. Every other step is fitted to; the result says how far the others are off."""
    from traincast.calibration.refine_traces import refine_from_traces as run

    return run(files, platform, None if out is None else Path(out))


def refine(store: str | Path, platform: str, *, out: str | Path | None = None) -> Refined:
    """Corrects the shipped model of a built-in GPU by a store that `bench` filled on one, and writes a platform (`out`,
    .toml) that predictions take. The fewer samples a family has, the less it is corrected. Needs polars."""
    from traincast.calibration.refine import refine_platform as run

    return run(Path(store), platform, None if out is None else Path(out))

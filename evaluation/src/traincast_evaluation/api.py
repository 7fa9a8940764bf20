"""The Python calls of this distribution; what they need is imported when they are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    from traincast_evaluation.fitting.shipped import FitResult
    from traincast_evaluation.suites.registry import Evaluation, MachineOptions

Progress = Callable[[float], None]
"""Hears the fraction that is done."""


def _ignore_progress(_: float) -> None:
    """Ignores progress."""


def fit(
    *pieces: str,
    data: str | Path | None = None,
    out: str | Path | None = None,
    into_package: bool = False,
    progress: Progress = _ignore_progress,
) -> FitResult:
    """Rebuilds the shipped profiles (all pieces, or those named) from a folder of measurements (`data`, default
    $TRAINCAST_DATA). They are written into the folder `out`, all or none; without one into the package
    itself if that is a source checkout, or if `into_package` says so."""
    from traincast_evaluation.fitting.shipped import fit as rebuild
    from traincast_evaluation.measurements import find_measurements_folder

    folder = None if out is None else Path(out)
    return rebuild(pieces, find_measurements_folder(data), folder, into_package=into_package, progress=progress)


def evaluate(
    suite: str,
    *,
    data: str | Path | None = None,
    roofline_only: bool = False,
    progress: Progress = _ignore_progress,
    **machine: Unpack[MachineOptions],
) -> Evaluation:
    """Predicted against published measurements, case by case, alongside what others score (errors in percent). The
    measurements are in the folder `data` (default $TRAINCAST_DATA). The suites "here" and "sharding" run steps on this
    `machine` instead (see `MachineOptions`); `data` is then where they keep what they find (default: by its store)."""
    from traincast_evaluation.measurements import find_measurements_folder
    from traincast_evaluation.suites import registry

    if registry.measures_here(suite, machine, roofline_only=roofline_only):
        folder = None if data is None else Path(data)
        return registry.evaluate_on_this_machine(suite, folder, machine, progress=progress)
    return registry.evaluate(
        suite, find_measurements_folder(data), roofline_only=roofline_only, minutes=machine.get("minutes"),
        progress=progress,
    )  # fmt: skip

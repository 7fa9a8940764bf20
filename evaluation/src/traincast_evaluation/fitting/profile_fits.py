"""Everything `traincast fit` rebuilds, in order: piece -> where its data goes, and the function that fits it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from traincast.utils.errors import make_unknown_error
from traincast.utils.files.writing import write_together
from traincast_evaluation.fitting.dates import date_profiles
from traincast_evaluation.kernels.families import MEASURED
from traincast_evaluation.kernels.fit import Progress, Training


@dataclass(frozen=True, slots=True)
class ProfileFit:
    """A fitted profile: the package folder it lives in, and what imports the function that writes it."""

    folder: str
    training: Callable[[], Training]

    def fit(self, data: Path, out: Path, progress: Progress) -> dict[str, Any]:
        """Writes the profile into `out` and returns its provenance."""
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1):  # sums in another order give other bytes
            return self.training()(data, out, progress)


def _import_fit(module: str, function: str) -> Callable[[], Training]:
    """A function of this package, imported when it is asked for."""
    return lambda: getattr(import_module(f"traincast_evaluation.fitting.{module}"), function)


PIECES = {
    **{measured.profile: ProfileFit("costs/kernels/profiles", measured.fit_function) for measured in MEASURED},
    "collectives": ProfileFit("costs/collectives/profiles", _import_fit("collectives", "fit_collectives")),
    "host": ProfileFit("costs/host/data", _import_fit("host", "fit_host")),
    "host-traces": ProfileFit("costs/host/data", _import_fit("host_traces", "fit_host_from_traces")),
    "overlap": ProfileFit("simulator/data", _import_fit("overlap", "fit_overlap")),
}


def fit_profiles(names: Iterable[str], data: Path, out: Path | None, progress: Progress) -> dict[str, list[str]]:
    """Fits the pieces named and returns the files written by piece. All are written, or none.

    `out` receives the package's folder layout; None is the installed package itself.
    """
    chosen = list(names)
    for name in chosen:
        if name not in PIECES:
            raise make_unknown_error("piece", name, PIECES, f"Choose from {', '.join(PIECES)}.")
    shipped = Path(str(files("traincast")))
    root = out or shipped
    written: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(chosen):
            folder = Path(scratch) / name
            folder.mkdir()
            PIECES[name].fit(data, folder, _scale_progress(progress, number, len(chosen)))
            date_profiles(folder, shipped / PIECES[name].folder)
        contents: dict[Path, bytes] = {}
        for name in chosen:
            target = root / PIECES[name].folder
            target.mkdir(parents=True, exist_ok=True)
            made = sorted((Path(scratch) / name).iterdir())
            contents |= {target / file.name: file.read_bytes() for file in made}
            written[name] = [str((target / file.name).relative_to(root)) for file in made]
        write_together(contents)
    return written


def _scale_progress(progress: Progress, number: int, of: int) -> Progress:
    """The progress of one piece as a part of the whole."""
    return lambda what, share: progress(what, (number + share) / of)

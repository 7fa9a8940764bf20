"""The shipped profiles rebuilt from a folder of measurements, and what that answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path
from traincast.utils.results import Records, Result
from traincast_evaluation.fitting.profile_fits import PIECES, fit_profiles


@dataclass(frozen=True, repr=False)
class FitResult(Result):
    """Profiles that were written: `files` are paths below `root` by the piece that was fitted."""

    root: Path | None
    files: dict[str, list[str]]

    def to_dict(self) -> dict[str, list[str]]:
        """The files by piece."""
        return self.files

    def headline(self) -> str:
        """One line per piece with its files."""
        return "\n".join(f"{piece}: {', '.join(paths)}" for piece, paths in self.files.items())

    def records(self) -> Records:
        """Table "files": one row per file."""
        return {"files": [{"piece": piece, "file": file} for piece, files in self.files.items() for file in files]}


def fit(
    pieces: Sequence[str],
    data: Path,
    out: Path | None,
    *,
    into_package: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> FitResult:
    """Fits the pieces named, each once, or all, and writes them to `out` or, where that is meant, into the package."""
    _check_folder(out, into_package)
    chosen = list(dict.fromkeys(pieces or PIECES))
    return FitResult(out, fit_profiles(chosen, data, out, lambda _, share: progress(share)))


def _check_folder(out: Path | None, into_package: bool) -> None:
    """Without a folder the profiles go into the package only where it is a source checkout, or on request."""
    if out is not None and into_package:
        raise TraincastError("`out` and `into_package` are two places for the profiles; give one")
    if out is not None and out.exists() and not out.is_dir():
        raise TraincastError(f"cannot write to '{format_path(out)}': it is no folder; give another `out`")
    if out is None and not into_package and not _is_in_checkout(Path(str(files("traincast")))):
        raise TraincastError(
            "no folder for the profiles: give `out`, or `into_package` to replace those of the installed package"
        )


def _is_in_checkout(package: Path) -> bool:
    """Whether the package is `src/traincast` of a source checkout, where the profiles are under version control."""
    return package.parent.name == "src" and (package.parent.parent / "pyproject.toml").is_file()

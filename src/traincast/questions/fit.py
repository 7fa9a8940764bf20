"""The shipped profiles rebuilt from a folder of measurements, and what that answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from traincast.fitting.pieces import PIECES, fit_pieces
from traincast.results import Records, Result


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
    pieces: Sequence[str], data: Path, out: Path | None, progress: Callable[[float], None] = lambda _: None
) -> FitResult:
    """Fits the pieces named, each once, or all; `out` None is the installed package."""
    chosen = list(dict.fromkeys(pieces or PIECES))
    return FitResult(out, fit_pieces(chosen, data, out, lambda _, share: progress(share)))

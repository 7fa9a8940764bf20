"""Peak memory of TorchRec's pipelines: captured as TorchRec's own benchmark runs them, against its pull requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from traincast_evaluation.suites.cases import LeftOut
from traincast_evaluation.suites.published import Row, read_rows

if TYPE_CHECKING:
    from traincast_evaluation.suites.memory import MemoryOutcome


def list_torchrec_outcomes(data: Path) -> Iterator[MemoryOutcome | LeftOut]:
    """Every row of the table: allocated, reserved and used memory of its fullest rank."""
    path = data / "iterations" / "torchrec_pipeline_memory.csv"
    for row in read_rows(path) if path.exists() else ():
        yield LeftOut(name=_name_row(row), group="TorchRec", reason="no captured step of this pipeline")


def _name_row(row: Row) -> str:
    return f"{row.label('name')} ({row.label('yaml')})"

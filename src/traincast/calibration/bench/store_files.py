"""The files of a store as rows, every one checked: a file may have been cut off, swapped or made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import polars as pl

from traincast.calibration.bench.device import Identity
from traincast.costs.cpu.samples import parse_row
from traincast.utils.errors import TraincastError
from traincast.utils.files.parquet import check_parquet_size, reject_bad_parquet
from traincast.utils.files.reading import format_path

_MOST_ROWS = 1_000_000  # a day and a night of measuring gives fewer
_TIMES = ("wall", "busy", "reference_wall", "reference_busy", "spread", "kernels")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file. One that holds no samples is rejected by name; one that is gone is a FileNotFoundError."""
    try:
        check_parquet_size(file, file.name)
        with reject_bad_parquet(file.name):
            frame = pl.read_parquet(file)
        if frame.height > _MOST_ROWS:
            raise TraincastError(f"{frame.height} rows")
        rows = list(frame.iter_rows(named=True))
        identities = {row["identity"] for row in rows}
        for identity in identities:
            Identity(**json.loads(identity))
        for row in rows:
            _check_row(row)
    except FileNotFoundError:
        raise
    except (TraincastError, OSError) as error:
        raise _describe_damage(file, str(error)) from None
    except (KeyError, TypeError, ValueError) as error:
        raise _describe_damage(file, f"it holds no samples: {error!r}") from None
    return rows


def _check_row(row: dict[str, Any]) -> None:
    """Raises what is wrong with a row."""
    sample = parse_row(row)
    if not isinstance(row["key"], str) or not isinstance(row["number"], int):
        raise TypeError("a sample has no key or number")
    if not all(math.isfinite(getattr(sample, name)) for name in _TIMES):
        raise ValueError("a time is not finite")
    if min(sample.reference_wall, sample.reference_busy) <= 0.0:
        raise ValueError("a reference took no time")


def _describe_damage(file: Path, reason: str) -> TraincastError:
    notes = " ".join(reason.split())[:160]
    return TraincastError(
        f"'{format_path(file)}' is damaged ({notes}); move it away: only its samples are measured again"
    )

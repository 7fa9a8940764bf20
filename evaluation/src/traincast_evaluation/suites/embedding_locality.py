"""Published reuse statistics of public embedding data sets."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.models.embeddings.reuse import NUM_BINS
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.reading import read_csv

_COUNTS = ("batch_size", "avg_num_indices", "avg_num_unique_rows")
_SHARES_OFF = 0.05  # three decimals each: the published ones add up to 1 within 0.01
_MOST = 1e10  # lookups and rows of a batch; the published ones have up to 2e9, and more would not fit into memory


@dataclass(frozen=True, eq=False, slots=True)
class Locality:
    """One published batch of all tables: lookups, different rows, and the shares of both by reuse bin."""

    batch_size: int
    lookups: float
    unique_rows: float
    row_shares: FloatArray
    access_shares: FloatArray


def read_locality(path: Path) -> dict[str, Locality]:
    """The published batches of one file, by name."""
    summary: dict[str, dict[str, float]] = defaultdict(dict)
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number, row in enumerate(read_csv(path, required=("dataset", "section", "metric", "value")), start=1):
        value = _parse_number(row["value"], f"'{path.name}', row {number}, column 'value'")
        if row["section"] == "summary":
            summary[row["dataset"]][row["metric"]] = value
        else:
            shares[row["dataset"], row["section"]].append(value)
    if not summary:
        raise TraincastError(f"'{path.name}' has no batch; give its rows of section 'summary'")
    batches = {}
    for name, values in summary.items():
        rows, accesses = shares[name, "unique_rows_by_reuse"], shares[name, "accesses_by_reuse"]
        if len(rows) != NUM_BINS or len(accesses) != NUM_BINS:
            raise TraincastError(
                f"{path}: {shorten_value(name)} has {len(rows)} and {len(accesses)} reuse bins; needs {NUM_BINS}"
            )
        _check_batch(f"{path}: {shorten_value(name)}", values, (rows, accesses))
        batches[name] = Locality(
            batch_size=int(values["batch_size"]),
            lookups=values["avg_num_indices"],
            unique_rows=values["avg_num_unique_rows"],
            row_shares=np.array(rows),
            access_shares=np.array(accesses),
        )
    return batches


def _parse_number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST:
        raise TraincastError(f"{where}: {shorten_value(text)} is not a number from 0 to {_MOST:g}")
    return value


def _check_batch(where: str, counts: dict[str, float], shares: tuple[list[float], list[float]]) -> None:
    """Rejects a batch without its counts, and shares that are none or add up to nothing."""
    for name in _COUNTS:
        if not counts.get(name, 0.0) >= 1:
            raise TraincastError(f"{where} has no {name} of at least 1")
    if counts["avg_num_unique_rows"] > counts["avg_num_indices"]:
        raise TraincastError(f"{where} has more different rows than lookups")
    for column in shares:
        if max(column) > 1 or abs(sum(column) - 1) > _SHARES_OFF:
            raise TraincastError(f"{where} has reuse shares that do not add up to 1; give shares of the whole")

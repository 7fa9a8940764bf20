"""Published reuse statistics of public embedding data sets."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.arrays import FloatArray
from traincast.embeddings.classes import NUM_BINS
from traincast.errors import TraincastError


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
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["section"] == "summary":
                summary[row["dataset"]][row["metric"]] = float(row["value"])
            else:
                shares[row["dataset"], row["section"]].append(float(row["value"]))
    batches = {}
    for name, values in summary.items():
        rows, accesses = shares[name, "unique_rows_by_reuse"], shares[name, "accesses_by_reuse"]
        if len(rows) != NUM_BINS or len(accesses) != NUM_BINS:
            raise TraincastError(f"{path}: {name} has {len(rows)} and {len(accesses)} reuse bins; needs {NUM_BINS}")
        batches[name] = Locality(
            batch_size=int(values["batch_size"]),
            lookups=values["avg_num_indices"],
            unique_rows=values["avg_num_unique_rows"],
            row_shares=np.array(rows),
            access_shares=np.array(accesses),
        )
    return batches

"""How much a Parquet file holds, told from its footer before anything of it is decoded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traincast.utils.errors import TraincastError

MAX_ROWS = 5_000_000
"""More is taken for a mistake: no public table has as many, and memory would not hold them."""
MAX_BYTES = 1 << 30
"""Of all columns at 8 bytes a value; the largest public table has about 130 MB."""
_VALUE_BYTES = 8


@contextmanager
def reject_bad_parquet(name: str) -> Iterator[None]:
    """Whatever the reader of Parquet files raises on a damaged one, its panics included, is bad input. Needs polars.

    What it prints of a panic, past Python to the error stream of the process, is dropped.
    """
    import polars as pl

    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    except pl.exceptions.PanicException:
        raise TraincastError(
            f"{name}: it is no Parquet file that can be read: damaged inside; write it again"
        ) from None
    except pl.exceptions.PolarsError as error:
        reason = (str(error).splitlines() or ["unreadable"])[0][:200]
        raise TraincastError(f"{name}: it is no Parquet file that can be read ({reason})") from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def check_parquet_size(path: Path, name: str) -> None:
    """Rejects a file that is no Parquet file or holds more than can be read at once; `name` is for the message. Needs
    polars."""
    import polars as pl

    with reject_bad_parquet(name):
        frame = pl.scan_parquet(path)
        columns, rows = len(frame.collect_schema()), int(frame.select(pl.len()).collect().item())
    if rows > MAX_ROWS:
        raise TraincastError(f"'{name}' has {rows} rows; at most {MAX_ROWS} are read")
    size = _VALUE_BYTES * rows * columns
    if size > MAX_BYTES:
        raise TraincastError(
            f"'{name}' unpacks to {size / 1e9:.1f} GB; at most {MAX_BYTES / 1e9:.1f} GB are read: give a part of it"
        )

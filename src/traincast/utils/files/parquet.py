"""How much a Parquet file holds, told from its footer before anything of it is decoded."""

from __future__ import annotations

from pathlib import Path

from traincast.utils.errors import TraincastError

MAX_ROWS = 5_000_000
"""More is taken for a mistake: no public table has as many, and memory would not hold them."""
MAX_BYTES = 1 << 30
"""Of all columns at 8 bytes a value; the largest public table has about 130 MB."""
_VALUE_BYTES = 8


def check_parquet_size(path: Path, name: str) -> None:
    """Rejects a file that is no Parquet file or holds more than can be read at once; `name` is for the message. Needs
    polars."""
    import polars as pl

    try:
        frame = pl.scan_parquet(path)
        columns, rows = len(frame.collect_schema()), int(frame.select(pl.len()).collect().item())
    except pl.exceptions.PolarsError as error:
        raise TraincastError(f"cannot read '{name}': it is no Parquet file ({str(error).splitlines()[0]})") from None
    if rows > MAX_ROWS:
        raise TraincastError(f"'{name}' has {rows} rows; at most {MAX_ROWS} are read")
    size = _VALUE_BYTES * rows * columns
    if size > MAX_BYTES:
        raise TraincastError(
            f"'{name}' unpacks to {size / 1e9:.1f} GB; at most {MAX_BYTES / 1e9:.1f} GB are read: give a part of it"
        )

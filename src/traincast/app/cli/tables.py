"""The tables of a result as files: CSV or Parquet, one for each table, all or none."""

from __future__ import annotations

import io
from pathlib import Path

from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path
from traincast.utils.files.writing import write_together
from traincast.utils.results import Result, encode_csv

FORMATS = ("csv", "parquet")


def check_folder(folder: Path | None) -> None:
    """Rejects a folder that is not there, before any work."""
    if folder is not None and not folder.is_dir():
        raise TraincastError(f"there is no folder '{format_path(folder)}' for the tables; make it first")


def write_tables(result: Result, folder: Path, kind: str) -> list[Path]:
    """Writes every table of a result that has rows as `NAME.csv` or `NAME.parquet`; returns the files."""
    contents: dict[Path, bytes] = {}
    if kind == "parquet":
        for name, frame in result.frames().items():
            buffer = io.BytesIO()
            frame.write_parquet(buffer)
            contents[folder / f"{name}.parquet"] = buffer.getvalue()
    else:
        contents = {folder / f"{name}.csv": encode_csv(rows) for name, rows in result.records().items() if rows}
    write_together(contents)
    return list(contents)

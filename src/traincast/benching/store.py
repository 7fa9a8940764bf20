"""The store: a folder of Parquet files, one per sample until they are merged. Nothing in it is ever half written.

A sample is a file of its own that is put in place whole, so a run that is killed loses the sample it was at and no
other. When a run begins or ends, single files are merged into one segment; a sample that is then in two files, because
the merging was killed, is counted once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from traincast.benching.device import Identity
from traincast.calibration.samples import Sample, parse_row, sample_row
from traincast.errors import TraincastError
from traincast.files.reading import shown_path
from traincast.files.writing import write_bytes

_SINGLE, _SEGMENT = "sample-", "segment-"
_MERGE_FROM = 64  # single files


class Store:
    """Samples of one device in a folder."""

    def __init__(self, folder: Path, identity: Identity | None = None) -> None:
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise TraincastError(f"store '{shown_path(folder)}' is no folder; give another")
        self._rows = self._read()
        self.identity = self._one_identity(identity)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str) -> Sample | None:
        """The sample of a key, None where it was not measured."""
        return parse_row(self._rows[key]) if key in self._rows else None

    def samples(self) -> Iterator[Sample]:
        """Every sample, oldest first."""
        for row in self._rows.values():
            yield parse_row(row)

    def append(self, key: str, sample: Sample) -> None:
        """Adds a sample under a key of its own; on the disk when this returns."""
        assert self.identity is not None
        row = {"key": key, "number": len(self._rows), "identity": json.dumps(self.identity.to_dict(), sort_keys=True)}
        self._rows[key] = row | sample_row(sample)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(f"{_SINGLE}{len(self._rows):06d}.parquet", [self._rows[key]])

    def merge(self) -> None:
        """Single files become one segment."""
        files = self._files()
        if sum(file.name.startswith(_SINGLE) for file in files) < _MERGE_FROM:
            return
        name = f"{_SEGMENT}{len(self._rows):06d}.parquet"
        self._write(name, list(self._rows.values()))
        for file in files:
            if file.name != name:
                file.unlink(missing_ok=True)

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        buffer = io.BytesIO()
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(buffer)
        write_bytes(self.folder / name, buffer.getvalue())

    def _files(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(
            file for file in self.folder.iterdir() if file.suffix == ".parquet" and not file.name.startswith(".")
        )

    def _read(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for file in self._files():
            try:
                for row in pl.read_parquet(file).iter_rows(named=True):
                    rows[str(row["key"])] = row
            except (pl.exceptions.PolarsError, OSError, KeyError) as error:
                reason = " ".join(str(error).split())[:120]
                raise TraincastError(
                    f"'{shown_path(file)}' is damaged ({reason}); move it away: only its samples are measured again"
                ) from None
        return dict(sorted(rows.items(), key=lambda item: int(item[1].get("number", 0))))

    def _one_identity(self, wanted: Identity | None) -> Identity | None:
        """The device all samples are of; it must be the one wanted."""
        known = {str(row["identity"]) for row in self._rows.values()}
        where = shown_path(self.folder)
        if len(known) > 1:
            raise TraincastError(f"store '{where}' mixes devices, threads, clocks or versions: {_differences(known)}")
        if not known:
            return wanted
        held = Identity(**json.loads(known.pop()))
        if wanted is not None and wanted != held:
            texts = {json.dumps(one.to_dict(), sort_keys=True) for one in (wanted, held)}
            raise TraincastError(f"store '{where}' is of another machine or set-up: {_differences(texts)}")
        return held


def _differences(identities: set[str]) -> str:
    """The fields in which identities differ."""
    tables = [json.loads(text) for text in sorted(identities)]
    fields = [name for name in tables[0] if len({str(table.get(name)) for table in tables}) > 1]
    return "; ".join(f"{name} {' / '.join(sorted({str(table.get(name)) for table in tables}))}" for name in fields)

"""The store: a folder of Parquet files, one per sample until they are merged. Nothing in it is ever half written.

A sample is a file of its own that is put in place whole, so a run that is killed loses the sample it was at and no
other. When a run ends, single files are merged into one segment; a sample that is then in two files, because the
merging was killed, is counted once. One process at a time adds to a store; any number may read it meanwhile.
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from traincast.calibration.bench.device import Device, Identity
from traincast.costs.cpu.samples import Sample, format_sample, parse_row
from traincast.utils.errors import TraincastError, make_unknown_error
from traincast.utils.files.parquet import read_parquet
from traincast.utils.files.reading import format_path
from traincast.utils.files.writing import write_bytes

_MOST_ROWS = 1_000_000  # a day and a night of measuring gives fewer
_TIMES = ("wall", "busy", "reference_wall", "reference_busy", "spread", "kernels")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file. One that holds no samples is rejected by name; one that is gone is a FileNotFoundError."""
    try:
        frame = read_parquet(file, file.name)
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


_SINGLE, _SEGMENT, _LOCK = "sample-", "segment-", ".lock"
_MERGE_FROM = 64  # single files
_LOOKS = 5  # at a folder whose files are being merged
_SAME_MEMORY = 0.02  # a new kernel keeps a little more or less of the memory for itself


class Store:
    """Samples of one device in a folder."""

    def __init__(self, folder: Path, identity: Identity | None = None) -> None:
        self.folder, self._wanted = folder, identity
        if folder.exists() and not folder.is_dir():
            raise TraincastError(f"store '{format_path(folder)}' is no folder; give another")
        self._lock: int | None = None
        self._load()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            os.close(self._lock)  # type: ignore[arg-type]

    def get(self, key: str) -> Sample | None:
        """The sample of a key, None where it was not measured."""
        return parse_row(self._rows[key]) if key in self._rows else None

    def samples(self) -> Iterator[Sample]:
        """Every sample, oldest first."""
        for row in self._rows.values():
            yield parse_row(row)

    def claim(self) -> None:
        """Makes this process the only one that adds to the store, until it ends or the store is dropped."""
        if self._lock is not None:
            return
        where = format_path(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TraincastError(
                f"cannot write to store '{where}': {error.strerror}; give another folder with `store`"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise TraincastError(
                f"store '{where}' is in use by another run; wait until it ends, or give another folder with `store`"
            ) from None
        except OSError:  # a file system without locks
            pass
        self._lock = lock
        self._load()  # what another run added in the meantime

    def append(self, key: str, sample: Sample) -> None:
        """Adds a sample under a key of its own; on the disk when this returns."""
        self.claim()
        assert self.identity is not None
        identity = json.dumps(self.identity.to_dict(), sort_keys=True)
        row = {"key": key, "number": self._next, "identity": identity} | format_sample(sample)
        self._write(f"{_SINGLE}{self._next:06d}.parquet", [row])
        self._rows[key] = row
        self._next += 1

    def merge(self) -> None:
        """Single files become one segment."""
        files = self._files()
        if sum(file.name.startswith(_SINGLE) for file in files) < _MERGE_FROM:
            return
        self.claim()
        name = f"{_SEGMENT}{len(self._rows):06d}.parquet"
        self._write(name, list(self._rows.values()))
        for file in files:
            if file.name != name:
                file.unlink(missing_ok=True)

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        buffer = io.BytesIO()
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(buffer)
        try:
            write_bytes(self.folder / name, buffer.getvalue())
        except TraincastError as error:
            raise TraincastError(
                f"{error}; nothing that was measured before is lost: put it right, and the same command goes on"
            ) from None

    def _files(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(
            file for file in self.folder.iterdir() if file.suffix == ".parquet" and not file.name.startswith(".")
        )

    def _load(self) -> None:
        self._rows = self._read()
        self.identity = self._one_identity(self._wanted)
        # not how many there are: a file that was moved away must not let another be written over
        self._next = 1 + max((int(row["number"]) for row in self._rows.values()), default=0)

    def _read(self) -> dict[str, dict[str, Any]]:
        for _ in range(_LOOKS):
            try:
                rows = {str(row["key"]): row for file in self._files() for row in read_rows(file)}
            except FileNotFoundError:  # a run that is under way has just merged its files
                continue
            return dict(sorted(rows.items(), key=lambda item: int(item[1]["number"])))
        raise TraincastError(f"store '{format_path(self.folder)}' changes while it is read; try again")

    def _one_identity(self, wanted: Identity | None) -> Identity | None:
        """The device all samples are of; it must be the one wanted."""
        known = {str(row["identity"]) for row in self._rows.values()}
        where = format_path(self.folder)
        if len(known) > 1:
            raise TraincastError(
                f"store '{where}' mixes devices, threads, clocks or versions: {_list_differences(known)}; "
                "measure into a "
                "new folder"
            )
        if not known:
            return wanted
        held = Identity(**json.loads(known.pop()))
        differing = [] if wanted is None else _list_differing_fields(wanted, held)
        if differing:
            raise TraincastError(
                f"store '{where}' is of another machine or set-up: {'; '.join(differing)}; give another folder with "
                "`store`"
            )
        return held


def _list_differing_fields(here: Identity, held: Identity) -> list[str]:
    """The fields in which two identities differ, each with both values."""
    pairs = [(name, value, held.to_dict()[name]) for name, value in here.to_dict().items()]
    return [
        f"{name} {value} here, {other} in the store"
        for name, value, other in pairs
        if value != other
        and not (name == "memory_bytes" and abs(value - other) <= _SAME_MEMORY * max(abs(value), abs(other)))
    ]


def _list_differences(identities: set[str]) -> str:
    """The fields in which identities differ."""
    tables = [json.loads(text) for text in sorted(identities)]
    fields = [name for name in tables[0] if len({str(table.get(name)) for table in tables}) > 1]
    return "; ".join(f"{name} {' / '.join(sorted({str(table.get(name)) for table in tables}))}" for name in fields)


DEVICES = ("cpu", "cuda")


def open_device(kind: str, index: int = 0, locked_mhz: float = 0.0) -> Device:
    """The device of this kind on this machine, of several GPUs number `index`, at the clock it was locked to (0: none);
    a CPU runs with one thread. Needs torch."""
    if kind == "cpu":
        if locked_mhz:
            raise TraincastError("a CPU's clock cannot be locked from here; leave out `clock_mhz`")
        from traincast.calibration.bench.devices import CpuDevice

        return CpuDevice()
    if kind == "cuda":
        from traincast.calibration.bench.devices import CudaDevice

        return CudaDevice(index, locked_mhz)
    raise make_unknown_error("device", kind, DEVICES, f"Choose from {', '.join(DEVICES)}.")

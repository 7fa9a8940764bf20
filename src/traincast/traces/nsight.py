"""Nsight Systems reports as `nsys export --type sqlite` writes them: kernels, copies, runtime calls and NVTX ranges.

The columns are those of NVIDIA's schema reference for exported data. Times are nanoseconds on one clock. Tensors are
not recorded, so kernels have names, grids and calls, and no shapes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from traincast.traces.events import EVENT, LIMIT, Interner, Kind, Table, TableBuilder, TimelineTrace, make_blank_events
from traincast.utils.errors import TraincastError, escape_text

MAGIC = b"SQLite format 3\x00"
_ROWS = 1 << 14  # fetched at a time
_KERNEL, _RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_MEMCPY, _MEMSET, _NVTX, _GPUS = (
    "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "NVTX_EVENTS", "TARGET_INFO_GPU",
)  # fmt: skip
_DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}  # of CUpti_ActivityMemcpyKind
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
_RANGES = (59, 60)  # of NVTX events: pushed and popped, started and ended
_GRID = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")


def read_nsight(path: Path) -> TimelineTrace:
    """Reads an exported report. Rejects a database that is none."""
    try:
        with closing(sqlite3.connect(f"file:{path.resolve().as_posix()}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            return _Reader(path, database).read_timeline()
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise TraincastError(f"'{path}' is no sound export of Nsight Systems: {error}") from None


class _Reader:
    """Turns the tables of one database into rows."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        self.rows = TableBuilder(EVENT)
        self.names: Interner[str] = Interner("names")
        self.details: Interner[bytes] = Interner("op arguments")
        self.details[b""]
        self.tracks: Interner[tuple[int | str, int | str]] = Interner("threads")
        self.columns = {name: self._list_columns(name) for name in (_KERNEL, _RUNTIME, _MEMCPY, _MEMSET, _NVTX, _GPUS)}

    def _list_columns(self, table: str) -> frozenset[str]:
        """The columns of a table, none where it is not there (a view is not taken for one)."""
        known = self.database.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,))
        if known.fetchone() is None:
            return frozenset()
        return frozenset(row[1] for row in self.database.execute(f"PRAGMA table_info({table})"))

    def read_timeline(self) -> TimelineTrace:
        if not self.columns[_KERNEL] and not self.columns[_RUNTIME]:
            raise TraincastError(
                f"'{self.path}' is a database without CUDA kernels or calls of Nsight Systems; trace cuda "
                "and nvtx with 'nsys profile', and export that as SQLite with 'nsys export'"
            )
        strings = dict(self._select("StringIds", ("id", "value"))) if self._list_columns("StringIds") else {}
        device = self._read_device(strings)
        self._read_host(strings)
        events = self.rows.finish_table()
        if not len(events):
            raise TraincastError(f"'{self.path}' has no kernels, calls or ranges; profile the run again")
        return TimelineTrace(
            path=self.path, events=events, names=tuple(map(escape_text, self.names)), details=tuple(self.details),
            tracks=tuple(self.tracks), device_name=self._find_device_name(device),
            notes=("an export of Nsight Systems: ops and shapes of tensors are not in it",),
        )  # fmt: skip

    def _select(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        found = self.database.execute(f"SELECT {', '.join(columns)} FROM {table}")
        while block := found.fetchmany(_ROWS):
            yield from block

    def _read_device(self, strings: dict[Any, Any]) -> int:
        """Kernels, copies and memsets; the number of the device of the first kernel."""
        first = -1
        has = self.columns[_KERNEL]
        name = next((c for c in ("demangledName", "shortName", "mangledName") if c in has), "NULL")
        grid = [column if column in has else "NULL" for column in _GRID]
        for start, end, number, stream, correlation, kernel, *sizes in self._select_if(
            _KERNEL, ("start", "end", "deviceId", "streamId", "correlationId", name, *grid)
        ):
            first = number if first < 0 else first
            self._add_row(
                Kind.KERNEL, str(strings.get(kernel, "kernel")), (number, stream), start, end, device=number,
                stream=stream, correlation=correlation, details=self._number_grid(sizes),
            )  # fmt: skip
        kinds = [column if column in self.columns[_MEMCPY] else "NULL" for column in ("copyKind", "srcKind", "dstKind")]
        common = ("start", "end", "deviceId", "streamId", "correlationId", "bytes")
        for start, end, number, stream, correlation, size, *kind in self._select_if(_MEMCPY, (*common, *kinds)):
            ends = " -> ".join(_MEMORIES.get(memory, "Unknown") for memory in kind[1:])
            self._add_row(
                Kind.MEMCPY, f"Memcpy {_DIRECTIONS.get(kind[0], 'unknown')} ({ends})", (number, stream), start, end,
                device=number, stream=stream, correlation=correlation, bytes=size,
            )  # fmt: skip
        for start, end, number, stream, correlation, size in self._select_if(_MEMSET, common):
            self._add_row(
                Kind.MEMSET, "Memset (Device)", (number, stream), start, end, device=number, stream=stream,
                correlation=correlation, bytes=size,
            )  # fmt: skip
        return first

    def _read_host(self, strings: dict[Any, Any]) -> None:
        """Runtime calls, and NVTX ranges: ops of PyTorch's `emit_nvtx`, all others annotations."""
        for start, end, thread, correlation, name in self._select_if(
            _RUNTIME, ("start", "end", "globalTid", "correlationId", "nameId")
        ):
            call = str(strings.get(name, "call")).partition("_v")[0]  # cudaLaunchKernel_v7000
            self._add_row(Kind.RUNTIME, call, ("host", thread), start, end, correlation=correlation)
        text = "textId" if "textId" in self.columns[_NVTX] else "NULL"
        for start, end, thread, kind, written, number in self._select_if(
            _NVTX, ("start", "end", "globalTid", "eventType", "text", text)
        ):
            if kind in _RANGES and end is not None:
                name = str(written or strings.get(number, "range"))
                op = name.startswith(("aten::", "autograd::", "c10d::"))
                name = name.partition(", ")[0] if op else name
                self._add_row(Kind.OP if op else Kind.ANNOTATION, name, ("host", thread), start, end)

    def _select_if(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Rows of a table that is there and has what is asked for ("NULL" aside)."""
        missing = sorted(set(columns) - {"NULL"} - self.columns[table])
        if not self.columns[table]:
            return iter(())
        if missing:
            raise TraincastError(
                f"'{self.path}': table {table} lacks {', '.join(missing)}; export it with a newer nsys"
            )
        return self._select(table, columns)

    def _add_row(
        self, kind: Kind, name: str, track: tuple[int | str, int | str], start: Any, end: Any, **columns: Any
    ) -> None:
        whole = all(isinstance(value, int) and abs(value) <= LIMIT for value in (start, end, *columns.values()))
        if not whole or end < start:
            raise TraincastError(f"'{self.path}' has a {kind.name.lower()} without sound numbers; export it again")
        row: Table = make_blank_events(1)
        row["kind"], row["name"], row["track"] = int(kind), self.names[name], self.tracks[track]
        row["start"], row["duration"] = start, end - start
        for column, value in columns.items():
            row[column] = value
        self.rows.append_block(row)

    def _number_grid(self, sizes: Sequence[Any]) -> int:
        if not all(isinstance(size, int) for size in sizes):
            return 0
        grid = {"grid": sizes[:3], "block": sizes[3:6], "registers": sizes[6]}
        return self.details[json.dumps(grid, separators=(",", ":")).encode()]

    def _find_device_name(self, number: int) -> str:
        """Name of the GPU ("" where the report does not say)."""
        if not {"id", "name"} <= self.columns[_GPUS]:
            return ""
        names = {key: str(name) for key, name in self._select(_GPUS, ("id", "name"))}
        same = names.get(number) or (next(iter(names.values())) if len(set(names.values())) == 1 else "")
        return escape_text(same)

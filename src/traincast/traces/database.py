"""Timelines in SQLite databases: what the readers of all tools that write such share.

Times are nanoseconds on one clock. Tensors are not recorded, so kernels have names, grids and calls, and no shapes.
Views of a file are not trusted: only its tables are read.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from traincast.traces.events import EVENT, LIMIT, Interner, Kind, Table, TableBuilder, TimelineTrace, make_blank_events
from traincast.utils.errors import TraincastError, escape_text

_ROWS = 1 << 14  # fetched at a time
_OPS = ("aten::", "autograd::", "c10d::")  # ranges of PyTorch's `emit_nvtx`; all others are annotations


class DatabaseReader:
    """Turns the tables of one database into rows. `tool` is who writes such, `columns` are those of its tables."""

    tool = ""
    tables: tuple[str, ...] = ()

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        self.rows = TableBuilder(EVENT)
        self.names: Interner[str] = Interner("names")
        self.details: Interner[bytes] = Interner("op arguments")
        self.details[b""]
        self.tracks: Interner[tuple[int | str, int | str]] = Interner("threads")
        self.columns = {table: self._list_columns(self.find_table(table)) for table in self.tables}
        self.notes = [f"a database of {self.tool}: ops and shapes of tensors are not in it"]

    def find_table(self, table: str) -> str:
        """What a table is called in this file."""
        return table

    def fill_rows(self) -> str:
        """Reads every table and returns the name of the device."""
        raise NotImplementedError

    def read_timeline(self) -> TimelineTrace:
        """The whole database."""
        device = self.fill_rows()
        events = self.rows.finish_table()
        if not len(events):
            raise TraincastError(f"'{self.path}' has no kernels, calls or ranges; profile the run again")
        return TimelineTrace(
            path=self.path, events=events, names=tuple(map(escape_text, self.names)), details=tuple(self.details),
            tracks=tuple(self.tracks), device_name=escape_text(device), notes=tuple(self.notes),
        )  # fmt: skip

    def _list_columns(self, table: str) -> frozenset[str]:
        """None of what is no table: a view may compute without an end."""
        kind = self.database.execute(
            "SELECT type FROM sqlite_master WHERE name = ? COLLATE NOCASE", (table,)
        ).fetchone()
        if kind != ("table",):
            return frozenset()
        return frozenset(row[1] for row in self.database.execute(f'PRAGMA table_info("{table}")'))

    def select_rows(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Rows of a table (none where there is no such table) that must have these columns ("NULL" aside)."""
        missing = sorted(set(columns) - {"NULL"} - self.columns[table])
        if not self.columns[table]:
            return
        if missing:
            raise TraincastError(
                f"'{self.path}': table {table} lacks {', '.join(missing)}; write it with a newer {self.tool}"
            )
        named = ", ".join(column if column == "NULL" else f'"{column}"' for column in columns)
        found = self.database.execute(f'SELECT {named} FROM "{self.find_table(table)}"')
        while block := found.fetchmany(_ROWS):
            yield from block

    def keep_known(self, table: str, columns: Sequence[str]) -> list[str]:
        """These columns, with "NULL" for those that the table does not have."""
        return [column if column in self.columns[table] else "NULL" for column in columns]

    def add_row(
        self, kind: Kind, name: str, track: tuple[int | str, int | str], start: Any, end: Any, **columns: Any
    ) -> None:
        """Appends an event; rejects one without sound numbers."""
        whole = all(isinstance(value, int) and abs(value) <= LIMIT for value in (start, end, *columns.values()))
        if not whole or end < start:
            raise TraincastError(f"'{self.path}' has a {kind.name.lower()} without sound numbers; write it again")
        row: Table = make_blank_events(1)
        row["kind"], row["name"], row["track"] = int(kind), self.names[name], self.tracks[track]
        row["start"], row["duration"] = start, end - start
        for column, value in columns.items():
            row[column] = value
        self.rows.append_block(row)

    def add_range(self, name: str, track: tuple[int | str, int | str], start: Any, end: Any) -> None:
        """Appends a range of the program's own: an op of PyTorch, or an annotation."""
        op = name.startswith(_OPS)
        self.add_row(Kind.OP if op else Kind.ANNOTATION, name.partition(", ")[0] if op else name, track, start, end)

    def number_grid(self, grid: Sequence[Any], block: Sequence[Any], registers: Any) -> int:
        """The number of a kernel's recorded grid; 0 where it was not recorded."""
        if not all(isinstance(size, int) for size in (*grid, *block, registers)):
            return 0
        sizes = {"grid": list(grid), "block": list(block), "registers": registers}
        return self.details[json.dumps(sizes, separators=(",", ":")).encode()]

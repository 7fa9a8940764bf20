"""The formats that traces come in: how each is told from the others, and what reads it; and folders of files, one entry
per rank.

A new format is a reader in a file of its own and a line in `FORMATS`: `docs/extend/add-a-trace-format.md`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from traincast.traces.captures import join_captures, launches_graphs, only_captures
from traincast.traces.chakra import read_chakra
from traincast.traces.events import TimelineTrace
from traincast.traces.execution import NODE_ARRAYS, ExecutionTrace, read_execution_trace
from traincast.traces.kineto import read_kineto
from traincast.traces.nsight import NsightReader
from traincast.traces.rocprof import RocprofReader
from traincast.traces.scan import ByteSource
from traincast.utils.errors import TraincastError

_SNIFFED = 1 << 22  # bytes: the metadata before the first array of a Kineto trace can be a few hundred KB
_JSON_STARTS = (b"{", b"[", b" ", b"\n", b"\r", b"\t", b"\xef")
_FIRST_ARRAY = re.compile(rb'"(%b)"\s*:\s*\[' % "|".join(("traceEvents", *NODE_ARRAYS)).encode())


@dataclass(frozen=True)
class TraceFormat:
    """A format: how its files are named in folders (`suffixes`), whether a file is one (`matches`, from its name and
    its first bytes unpacked), and its reader."""

    name: str
    suffixes: tuple[str, ...]
    matches: Callable[[str, bytes], bool]
    read: Callable[[Path], TimelineTrace | ExecutionTrace]


def _is_chakra(name: str, start: bytes) -> bool:
    return name.endswith((".et", ".et.gz")) and not start.startswith(_JSON_STARTS)


def _is_execution_trace(name: str, start: bytes) -> bool:
    array = _FIRST_ARRAY.search(start)
    return array is not None and array[1] != b"traceEvents"


def _is_database(name: str, start: bytes) -> bool:
    return start.startswith(b"SQLite format 3\x00")


def _read_database(path: Path) -> TimelineTrace:
    """Reads a database of Nsight Systems or of rocprofv3."""
    try:
        with closing(sqlite3.connect(f"file:{path.resolve().as_posix()}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            database.set_progress_handler(lambda: 0, 1_000_000)  # lets Ctrl-C in
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "rocpd_op" in tables:
                raise TraincastError(f"'{path}' is a trace of rocmProfileData; record the run with rocprofv3")
            rocprof = any(name.startswith("rocpd_") for name in tables)
            return (RocprofReader if rocprof else NsightReader)(path, database).read_timeline()
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise TraincastError(f"'{path}' is no sound database of Nsight Systems or rocprofv3: {error}") from None


def _is_anything(name: str, start: bytes) -> bool:
    return True


# the first that matches reads the file; Kineto's reader says of everything else what is wrong with it
FORMATS: tuple[TraceFormat, ...] = (
    TraceFormat("database of Nsight Systems or rocprofv3", (".sqlite", ".db"), _is_database, _read_database),
    TraceFormat("Chakra", (".et", ".et.gz"), _is_chakra, read_chakra),
    TraceFormat(
        "PyTorch execution trace", (".json", ".json.gz", ".json.zip"), _is_execution_trace, read_execution_trace
    ),
    TraceFormat("Kineto", (".json", ".json.gz", ".json.zip"), _is_anything, read_kineto),
)


SUFFIXES = tuple(dict.fromkeys(suffix for known in FORMATS for suffix in known.suffixes))
"""How the files of all formats end."""


# files of other tools: how their names end or their content begins, what they are, and what to give instead
_FOREIGN = (
    ((".nsys-rep", ".qdrep"), b"", "a report of Nsight Systems", "export it as SQLite with 'nsys export'"),
    ((".ncu-rep",), b"", "a report of Nsight Compute, which has no timeline", "record one with PyTorch's profiler"),
    ((".pftrace", ".perfetto-trace"), b"", "a Perfetto trace", "write Chrome JSON"),
    ((".pickle", ".pkl"), b"\x80", "a pickle (a memory snapshot?), which may run code and is not read",
     "record memory with PyTorch's profiler (profile_memory=True)"),
    ((), b'"rocprofiler-sdk-tool"', "rocprofv3's own JSON", "give its database (output format rocpd)"),
    ((".csv",), b'"Kind","Agent_Id"', "a table of rocprofv3", "give its database (output format rocpd)"),
)  # fmt: skip
_NEAR = 256  # bytes in which a file says what it is


def _check_foreign(path: Path, start: bytes) -> None:
    """Rejects files of other tools by what they are."""
    for suffixes, begin, what, remedy in _FOREIGN:
        told = begin and (start.startswith(begin) or (begin.startswith(b'"') and begin in start[:_NEAR]))
        if path.name.endswith(suffixes or ("/",)) or told:
            raise TraincastError(f"'{path}' is {what}; {remedy}")


def read_trace_file(path: str | Path) -> TimelineTrace | ExecutionTrace:
    """Reads a trace of any format; which one is told from its name and content."""
    path = Path(path)
    start = _read_first_bytes(path)
    _check_foreign(path, start)
    return next(known for known in FORMATS if known.matches(path.name, start)).read(path)


def _read_first_bytes(path: Path) -> bytes:
    source = ByteSource(path)
    try:
        start = source.read(_SNIFFED)
        while len(start) < _SNIFFED and (more := source.read(_SNIFFED - len(start))):
            start += more
    finally:
        source.close()
    return start


T = TypeVar("T", TimelineTrace, ExecutionTrace)
_RANK = re.compile(r"(?:rank|worker)[-_]?(\d{1,7})", re.IGNORECASE)


@dataclass(frozen=True, eq=False, kw_only=True)
class RankTraces:
    """What was recorded of one rank: its timeline, its execution trace, or both."""

    rank: int
    timeline: TimelineTrace | None = None
    execution: ExecutionTrace | None = None


def read_ranks(paths: Sequence[str | Path]) -> list[RankTraces]:
    """Reads files and folders; a timeline and an execution trace of the same rank belong together."""
    timelines: dict[int, TimelineTrace] = {}
    executions: dict[int, ExecutionTrace] = {}
    traces = [read_trace_file(path) for path in _list_files(paths)]
    for trace in _join_captures([trace for trace in traces if isinstance(trace, TimelineTrace)]):
        rank = trace.rank if trace.rank is not None else _rank_in_name(trace.path, len(timelines))
        _add_trace(timelines, rank, trace)
    for nodes in (trace for trace in traces if isinstance(trace, ExecutionTrace)):
        _add_trace(executions, _rank_in_name(nodes.path, len(executions)), nodes)
    if len(timelines) == len(executions) == 1:  # a pair of one run, however the files are called
        executions = {next(iter(timelines)): next(iter(executions.values()))}
    return [
        RankTraces(rank=rank, timeline=timelines.get(rank), execution=executions.get(rank))
        for rank in sorted(timelines.keys() | executions.keys())
    ]


def _join_captures(traces: list[TimelineTrace]) -> list[TimelineTrace]:
    """The timelines, each that launches graphs with those of how they were captured: of the same rank, or without."""
    captures = [trace for trace in traces if only_captures(trace)]
    if not captures or not any(map(launches_graphs, traces)):
        return traces
    joined = []
    for trace in (trace for trace in traces if not only_captures(trace)):
        for captured in captures if launches_graphs(trace) else ():
            trace = join_captures(trace, captured) if captured.rank in (None, trace.rank) else trace
        joined.append(trace)
    return joined


def _add_trace(traces: dict[int, T], rank: int, trace: T) -> None:
    if rank in traces:
        raise TraincastError(
            f"'{traces[rank].path}' and '{trace.path}' are both of rank {rank}; give them one at a time"
        )
    traces[rank] = trace


def _list_files(paths: Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for name in paths:
        if not str(name):
            raise TraincastError("'' is no trace; give the path of a file or a folder")
        path = Path(name)
        if not _is_folder(path):
            files.append(path)
            continue
        inside = sorted(entry for entry in path.iterdir() if entry.name.endswith(SUFFIXES) and entry.is_file())
        if not inside:
            raise TraincastError(f"folder '{path}' holds no trace ({', '.join(SUFFIXES)})")
        files += inside
    return files


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the name is too long, say: reading the file tells
        return False


def _rank_in_name(path: Path, default: int) -> int:
    named = _RANK.search(path.name)
    return int(named[1]) if named else default

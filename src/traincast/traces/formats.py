"""The formats that traces come in: how each is told from the others, and what reads it; and folders of files, one entry
per rank.

A new format is a reader in a file of its own and a line in `FORMATS`: `docs/extend/add-a-trace-format.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from traincast.traces.chakra import read_chakra
from traincast.traces.events import TimelineTrace
from traincast.traces.execution import NODE_ARRAYS, ExecutionTrace, read_execution_trace
from traincast.traces.kineto import read_kineto
from traincast.traces.nsight import MAGIC, read_nsight
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


def _is_nsight(name: str, start: bytes) -> bool:
    return start.startswith(MAGIC)


def _is_anything(name: str, start: bytes) -> bool:
    return True


# the first that matches reads the file; Kineto's reader says of everything else what is wrong with it
FORMATS: tuple[TraceFormat, ...] = (
    TraceFormat("Nsight Systems", (".sqlite",), _is_nsight, read_nsight),
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
    ((), b'"rocprofiler-sdk-tool"', "rocprofv3's own JSON", "record with PyTorch's profiler"),
    ((".csv",), b'"Kind","Agent_Id"', "a table of rocprofv3", "record with PyTorch's profiler"),
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
    for path in _list_files(paths):
        trace = read_trace_file(path)
        if isinstance(trace, TimelineTrace):
            rank = trace.rank if trace.rank is not None else _rank_in_name(path, len(timelines))
            _add_trace(timelines, rank, trace)
        else:
            _add_trace(executions, _rank_in_name(path, len(executions)), trace)
    if len(timelines) == len(executions) == 1:  # a pair of one run, however the files are called
        executions = {next(iter(timelines)): next(iter(executions.values()))}
    return [
        RankTraces(rank=rank, timeline=timelines.get(rank), execution=executions.get(rank))
        for rank in sorted(timelines.keys() | executions.keys())
    ]


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
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(entry for entry in path.iterdir() if entry.name.endswith(SUFFIXES) and entry.is_file())
        if not inside:
            raise TraincastError(f"folder '{path}' holds no trace ({', '.join(SUFFIXES)})")
        files += inside
    return files


def _rank_in_name(path: Path, default: int) -> int:
    named = _RANK.search(path.name)
    return int(named[1]) if named else default

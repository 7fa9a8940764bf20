"""The formats that traces come in: how each is told from the others, and what reads it.

A new format is a reader in a file of its own and a line in `FORMATS`: `docs/extend/add-a-trace-format.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from traincast.traces.chakra import read_chakra
from traincast.traces.events import TimelineTrace
from traincast.traces.execution import NODE_ARRAYS, ExecutionTrace, read_execution_trace
from traincast.traces.kineto import read_kineto
from traincast.traces.nsight import MAGIC, read_nsight
from traincast.traces.source import ByteSource
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

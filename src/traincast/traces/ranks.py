"""Trace files, or folders of them, as one entry per rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from traincast.errors import TraincastError
from traincast.traces.chakra import read_chakra
from traincast.traces.events import KinetoTrace
from traincast.traces.execution import read_execution_trace
from traincast.traces.kineto import read_kineto
from traincast.traces.nodes import ExecutionTrace
from traincast.traces.source import ByteSource

T = TypeVar("T", KinetoTrace, ExecutionTrace)
_SNIFF = 1 << 22
_SUFFIXES = (".json", ".json.gz", ".et", ".et.gz")
_RANK = re.compile(r"(?:rank|worker)[-_]?(\d{1,7})", re.IGNORECASE)
_ARRAY = re.compile(rb'"(traceEvents|nodes|workload_graph)"\s*:\s*\[')


@dataclass(frozen=True, eq=False, kw_only=True)
class RankTraces:
    """What was recorded of one rank: its timeline, its execution trace, or both."""

    rank: int
    kineto: KinetoTrace | None = None
    execution: ExecutionTrace | None = None


def read_trace_file(path: str | Path) -> KinetoTrace | ExecutionTrace:
    """Reads a trace of any kind; which one is told from its content."""
    path = Path(path)
    source = ByteSource(path)
    try:
        start = source.read(_SNIFF)
        while len(start) < _SNIFF and (more := source.read(_SNIFF - len(start))):
            start += more
    finally:
        source.close()
    if start[:1] not in (b"{", b"[", b" ", b"\n", b"\r", b"\t", b"\xef") and path.name.endswith((".et", ".et.gz")):
        return read_chakra(path)
    found = _ARRAY.search(start)
    if found and found[1] != b"traceEvents":
        return read_execution_trace(path)
    return read_kineto(path)


def read_ranks(paths: Sequence[str | Path]) -> list[RankTraces]:
    """Reads files and folders; a timeline and an execution trace of the same rank belong together."""
    timelines: dict[int, KinetoTrace] = {}
    executions: dict[int, ExecutionTrace] = {}
    for path in _files(paths):
        trace = read_trace_file(path)
        if isinstance(trace, KinetoTrace):
            rank = trace.rank if trace.rank is not None else _rank_in_name(path, len(timelines))
            _add(timelines, rank, trace)
        else:
            _add(executions, _rank_in_name(path, len(executions)), trace)
    if len(timelines) == len(executions) == 1:  # a pair of one run, however the files are called
        executions = {next(iter(timelines)): next(iter(executions.values()))}
    return [
        RankTraces(rank=rank, kineto=timelines.get(rank), execution=executions.get(rank))
        for rank in sorted(timelines.keys() | executions.keys())
    ]


def _add(traces: dict[int, T], rank: int, trace: T) -> None:
    if rank in traces:
        raise TraincastError(
            f"'{traces[rank].path}' and '{trace.path}' are both of rank {rank}; give them one at a time"
        )
    traces[rank] = trace


def _files(paths: Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for given in map(Path, paths):
        if not given.is_dir():
            files.append(given)
            continue
        inside = sorted(entry for entry in given.iterdir() if entry.name.endswith(_SUFFIXES) and entry.is_file())
        if not inside:
            raise TraincastError(f"folder '{given}' holds no trace ({', '.join(_SUFFIXES)})")
        files += inside
    return files


def _rank_in_name(path: Path, default: int) -> int:
    found = _RANK.search(path.name)
    return int(found[1]) if found else default

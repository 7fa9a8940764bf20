"""Trace files, or folders of them, as one entry per rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from traincast.traces.events import TimelineTrace
from traincast.traces.execution import ExecutionTrace
from traincast.traces.formats import SUFFIXES, read_trace_file
from traincast.utils.errors import TraincastError

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

"""Processes that work together on this machine, launched as torchrun would; no torch needed here.

Each rank has one thread and, where there are enough, a core of its own; what it measures is written line by line, so
that an interrupted run keeps what it has.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from traincast.calibration.bench.measure import JOBS, LAUNCHER, RESULTS
from traincast.utils.errors import TraincastError

_LOOK_SECONDS = 0.2  # between two looks at the ranks' results, which take time of a core that ranks are measured on
_END_SECONDS = 5.0  # that ranks get to end by themselves
_ERROR_LENGTH = 300  # characters of a rank's last words that a message repeats


def run_ranks(
    jobs: Sequence[Mapping[str, Any]],
    ranks: int,
    *,
    each: Callable[[dict[str, Any]], None],
    seconds: float = float("inf"),
    module: str = "traincast.calibration.bench.rank",
    device: str = "cpu",
) -> None:
    """Lets `ranks` processes do the jobs one after the other; `each` hears the result of every job as it comes. After
    `seconds` no further job is waited for. A rank runs `module`, see `benching.rank.serve`."""
    with _write_job_folder(jobs, device) as folder:
        port = _find_free_port()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                processes.append(_start_rank(rank, ranks, port, folder, module))
            complete = _follow_results(processes, folder, len(jobs), each, time.monotonic() + seconds)
            _end_processes(processes, _END_SECONDS if complete else 0.0)
        finally:
            _end_processes(processes, 0.0)


@contextmanager
def _write_job_folder(jobs: Sequence[Mapping[str, Any]], device: str) -> Iterator[Path]:
    """A folder with the jobs in it, while ranks work."""
    try:
        made = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(made.name)
        (folder / JOBS).write_text(json.dumps({"device": device, "jobs": list(jobs)}), encoding="utf-8")
        (folder / RESULTS).touch()
    except OSError as error:
        where = tempfile.gettempdir()
        raise TraincastError(
            f"ranks cannot be started: nothing can be written to '{where}' ({error.strerror}); make room there"
        ) from None
    with made:
        yield folder


def _start_rank(rank: int, ranks: int, port: int, folder: Path, module: str) -> subprocess.Popen[bytes]:
    """One rank, with the environment that torchrun gives."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        LAUNCHER: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", module, str(folder)]
    with _name_output_file(folder, rank).open("wb") as words:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=words, stderr=words)


def _name_output_file(folder: Path, rank: int) -> Path:
    """What a rank says."""
    return folder / f"rank{rank}.txt"


def _follow_results(
    processes: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    expected: int,
    each: Callable[[dict[str, Any]], None],
    deadline: float,
) -> bool:
    """Hears results until all are there, which it tells, the time is over, or a rank has failed."""
    on_result = read = 0
    while on_result < expected and time.monotonic() < deadline:
        ended = [process.poll() for process in processes]  # before reading, so that no last result is missed
        with (folder / RESULTS).open("rb") as results:
            results.seek(read)
            lines = results.read().split(b"\n")[:-1]
        for line in lines:
            each(json.loads(line))
        read += sum(len(line) + 1 for line in lines)
        on_result += len(lines)
        failed = [rank for rank, code in enumerate(ended) if code]
        if on_result < expected and (failed or all(code == 0 for code in ended)):
            rank = failed[0] if failed else 0
            raise TraincastError(f"rank {rank} of {len(processes)} ended early: {_read_last_output(folder, rank)}")
        if on_result < expected:
            time.sleep(_LOOK_SECONDS)
    return on_result == expected


def _read_last_output(folder: Path, rank: int) -> str:
    lines = _name_output_file(folder, rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " ".join(lines[-1].split())[:_ERROR_LENGTH] if lines else "it said nothing"


def _end_processes(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Ranks get so long to end by themselves and are then ended: one alone would wait for the other for ever."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _find_free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

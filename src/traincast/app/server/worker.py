"""A worker process: takes tasks from a pipe one after the other, says how far it is, sends back what it made.

Both directions are JSON and raw bytes: nothing that crosses the pipe is ever executed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection

PROGRESS, DONE, REFUSED, BROKEN = b"p", b"d", b"r", b"b"
"""How a message of a worker begins: a fraction; the result; a rejection; a mistake of ours."""
CHECK = "check"
"""The form of a job that only says what an uploaded file is."""
_NICE = 15  # of searches, so that the server's own process and quick questions always come first
_EVERY = 0.1  # seconds between two messages about progress


def serve_requests(pipe: Connection, most_memory: int, *, is_long: bool) -> None:
    """Serves until the pipe closes; `most_memory` bytes are all that the process may map. One for long jobs (`is_long`)
    leaves the processor to all others."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    if is_long:
        with suppress(OSError):
            os.nice(_NICE)
    _limit_memory(most_memory)
    with suppress(EOFError, OSError):  # the server is gone: so are we
        while True:
            pipe.send_bytes(_compute_result(pipe, json.loads(pipe.recv_bytes())))


def _limit_memory(most: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # not every system can
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _compute_result(pipe: Connection, task: dict[str, str]) -> bytes:
    from traincast.app.server.responses import check_file, make_result_bytes
    from traincast.utils.errors import TraincastError

    notes = 0.0

    def progress(fraction: float) -> None:
        nonlocal notes
        if time.monotonic() - notes > _EVERY:
            notes = time.monotonic()
            pipe.send_bytes(PROGRESS + f"{fraction:.4f}".encode())

    try:
        paths = json.loads(task["paths"])
        if task["form"] == CHECK:
            return DONE + check_file(paths["file"])
        return DONE + make_result_bytes(task["question"], task["form"], paths, progress)
    except TraincastError as error:
        return REFUSED + str(error).encode()
    except MemoryError:
        return REFUSED + b"not enough memory for this input; give a smaller one"
    except Exception as error:
        return BROKEN + f"{type(error).__name__}: {error}".encode()

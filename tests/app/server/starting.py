"""The command itself, as a process with a socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request


def fetched(url, data=None, method=None, **headers):
    """The JSON of a result."""
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=300) as result:
        return json.loads(result.read() or b"null")


@contextlib.contextmanager
def server(*options):
    """`traincast serve`: its process and its address; all it started is ended."""
    command = [sys.executable, "-m", "traincast", "serve", "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline()
        yield process, json.loads(text)["url"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

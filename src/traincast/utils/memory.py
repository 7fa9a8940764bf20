"""The memory of this machine."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def read_free_memory_bytes() -> int:
    """Memory of this machine that new tensors can have without swapping; a very large number where it does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return 1 << 62


def read_most_memory_bytes() -> int:
    """The most that this process has held so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

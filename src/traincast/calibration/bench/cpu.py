"""A CPU as a device: its kernels run on the host thread, so a mark is a reading of the host's clocks."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from traincast.calibration.bench.device import Identity, Seconds

_FLUSHED_BYTES = 64 << 20  # twice the largest last-level cache slice that one core of a server sees
_KEEP = {-1: -1, -4: 0, -2: 64 << 20}  # M_TRIM_THRESHOLD: never, M_MMAP_MAX: none, M_TOP_PAD: 64 MB at a time
_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_BLOCK = 1 << 18  # numbers
_INTEGER_RANGE = 1024  # values of integer tensors: any small range does


class CpuDevice:
    """This machine's processor, one thread, with an allocator that keeps what it has (see `keep_memory`)."""

    kind = "cpu"

    def __init__(self, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._keeps = keep_memory()
        self._random = torch.Generator().manual_seed(0)
        self._block = 0.5 + torch.rand(_BLOCK, generator=self._random)
        self._flushed: torch.Tensor | None = None

    def identity(self) -> Identity:
        """The processor as the system names it, its threads, and the libraries behind torch's kernels."""
        return Identity(
            device=self.kind,
            name=_read_cpu_field("model name") or platform.machine(),
            threads=torch.get_num_threads(),
            locked_clock_mhz=0.0,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            torch=torch.__version__,
            libraries=_list_libraries() + ("+kept-malloc" if self._keeps else ""),
        )

    def allocate(self, shape: Sequence[int], dtype: str = "float32") -> torch.Tensor:
        """Numbers from 0.5 to 1.5, or small whole ones: roots of negative numbers take 18 times as long as others, and
        what is multiplied in place by smaller ones soon leaves the range of normal numbers."""
        kind: torch.dtype = getattr(torch, dtype)
        if kind.is_floating_point:
            return self._numbers(math.prod(shape)).view(tuple(shape)).to(kind)
        return torch.randint(_INTEGER_RANGE, tuple(shape), generator=self._random).to(kind)

    def _numbers(self, count: int) -> torch.Tensor:
        """Positive numbers, a block of them over and over: drawing them all would take longer than measuring."""
        made = torch.empty(count)
        whole = count // _BLOCK * _BLOCK
        made[:whole].view(-1, _BLOCK).copy_(self._block)
        made[whole:] = self._block[: count - whole]
        return made

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor is there already."""
        return tensor

    def mark(self) -> tuple[int, int]:
        """Nanoseconds on the wall's clock and of this thread."""
        return time.perf_counter_ns(), time.thread_time_ns()

    def elapsed(self, begin: tuple[int, int], end: tuple[int, int]) -> Seconds:
        """The differences."""
        return Seconds(1e-9 * (end[0] - begin[0]), 1e-9 * (end[1] - begin[1]))

    def synchronise(self) -> None:
        """Nothing is ever under way."""

    def lead(self) -> None:
        """A call runs on the host: there is nothing to leave out."""

    def flush(self, nbytes: int | None = None) -> None:
        """Writes so much of a buffer, by default more than the caches hold."""
        wanted = (_FLUSHED_BYTES if nbytes is None else nbytes) // 4
        if self._flushed is None or self._flushed.numel() < wanted:
            self._flushed = torch.zeros(max(wanted, _FLUSHED_BYTES // 4))
        self._flushed[:wanted].add_(1.0)

    def clock_mhz(self) -> float:
        """What the system says of its first processor."""
        try:
            return float(_read_cpu_field("cpu MHz") or 0.0)
        except ValueError:
            return 0.0

    def free_bytes(self) -> int:
        """Memory that the system can give without swapping."""
        return read_free_memory_bytes()

    def neighbours(self) -> str:
        """Its two clocks tell during a run."""
        return ""


def read_free_memory_bytes() -> int:
    """Memory of this machine that new tensors can have without swapping; a very large number where it does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return 1 << 62


def keep_memory() -> bool:
    """Tells glibc's malloc not to give freed memory back to the system; False where there is no glibc.

    Otherwise it returns the top of its heap whenever that is free, and a step pays a page fault for every 4 KB that it
    gets back: a third of a small DLRM's step here, and hardly twice the same. PyTorch's tuning guide has jemalloc or
    TCMalloc for that reason; both keep memory as well.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(option, value) == 1 for option, value in _KEEP.items())


def _read_cpu_field(field: str) -> str:
    """A field of the first processor in Linux's list; "" elsewhere."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _list_libraries() -> str:
    backends: Any = torch.backends
    names = [name for name in ("mkl", "mkldnn") if getattr(backends, name).is_available()]
    return "+".join([backends.cpu.get_cpu_capability(), *names])

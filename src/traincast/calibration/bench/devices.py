"""The devices that are measured: a CPU, whose kernels run on the host thread, and CUDA (or ROCm) through `torch.cuda`
alone."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from traincast.calibration.bench.device import Identity, Seconds
from traincast.utils.errors import TraincastError
from traincast.utils.memory import read_free_memory_bytes

_FLUSHED_BYTES = 64 << 20  # twice the largest last-level cache slice that one core of a server sees
_KEEP = {-1: -1, -4: 0, -2: 64 << 20}  # M_TRIM_THRESHOLD: never, M_MMAP_MAX: none, M_TOP_PAD: 64 MB at a time
_CPUINFO = Path("/proc/cpuinfo")
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


_LEAST_FLUSHED = 256 << 20  # bytes
_FLUSHED_CACHES = 4  # times the L2: some of what is written may stay in place of what was written before
_HIP_FLUSHED = 1 << 30  # AMD's Infinity Cache (256 MB) is not part of the L2 that a device names
_LEAD_SECONDS = 5e-4  # launching an op of several kernels takes the host up to a tenth of a millisecond
_PROBE_CYCLES = 1_000_000
_OTHERS_BYTES = 2 << 30  # beyond what the driver and this process's own context take


class CudaDevice:
    """GPU number `index` of those this process sees; `locked_mhz` is the SM clock it was locked to (0: it floats)."""

    kind = "cuda"

    def __init__(self, index: int = 0, locked_mhz: float = 0.0) -> None:
        if not torch.cuda.is_available():
            raise TraincastError(f"{_explain_no_gpu()}; or give `device='cpu'`")
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise TraincastError(f"no GPU {index}; this machine has {count}")
        self.index, self.locked_mhz = index, locked_mhz
        self._flushed: torch.Tensor | None = None
        self._lead_cycles: int | None = None
        try:
            torch.cuda.set_device(index)
            torch.zeros(1, device=self._name).add_(1.0)  # a torch that was not built for this chip fails here
            torch.cuda.synchronize(index)
        except RuntimeError as error:
            notes = " ".join(str(error).split())[:200]
            raise TraincastError(f"GPU {index} cannot be used: {notes}; give `device='cpu'`") from None

    def identity(self) -> Identity:
        """The GPU by its name, and the libraries that drive it."""
        properties: Any = torch.cuda.get_device_properties(self.index)
        version: Any = torch.version
        cudnn: Any = torch.backends.cudnn
        driver = f"hip {version.hip}" if version.hip else f"cuda {version.cuda}"
        return Identity(
            device=self.kind,
            name=str(properties.name),
            threads=1,
            locked_clock_mhz=self.locked_mhz,
            memory_bytes=int(properties.total_memory),
            torch=torch.__version__,
            libraries=f"{driver} cudnn {cudnn.version()}",
        )

    def allocate(self, shape: Sequence[int], dtype: str = "float32") -> torch.Tensor:
        """Normal numbers, or small whole ones; drawn on the GPU."""
        kind: torch.dtype = getattr(torch, dtype)
        with self._fits(f"a tensor of {' x '.join(map(str, shape))} {dtype}"):
            if kind.is_floating_point:
                return torch.randn(*shape, device=self._name, dtype=torch.float32).to(kind)
            values = 2 if kind is torch.bool else min(_INTEGER_RANGE, torch.iinfo(kind).max)
            return torch.randint(values, tuple(shape), device=self._name, dtype=kind)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU."""
        with self._fits(f"a tensor of {' x '.join(map(str, tensor.shape))}"):
            return tensor.to(self._name)

    def mark(self) -> Any:
        """An event in the current stream."""
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record()
        return event

    def elapsed(self, begin: Any, end: Any) -> Seconds:
        """The time between two events; a GPU has no second clock."""
        seconds = 1e-3 * float(begin.elapsed_time(end))
        return Seconds(seconds, seconds)

    def synchronise(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize(self.index)

    def lead(self) -> None:
        """Lets the GPU count cycles for half a millisecond: no memory is touched."""
        if self._lead_cycles is None:
            self._lead_cycles = self._cycles(_LEAD_SECONDS)
        if self._lead_cycles:
            _queue_sleep(self._lead_cycles)

    def flush(self, nbytes: int | None = None) -> None:
        """Writes so much of a buffer, by default more than the caches hold."""
        wanted = (self._cache_bytes() if nbytes is None else nbytes) // 4
        if self._flushed is None or self._flushed.numel() < wanted:
            self._flushed = None  # given back first: a small GPU may not hold both
            with self._fits("the buffer that empties the caches"):
                self._flushed = torch.zeros(max(wanted, _LEAST_FLUSHED // 4), device=self._name)
        self._flushed[:wanted].add_(1.0)

    def clock_mhz(self) -> float:
        """The SM clock now, where NVML or AMD SMI can be asked for it."""
        try:
            return float(torch.cuda.clock_rate(self.index))
        except Exception:  # no bindings, no permission (containers, MIG): errors that have no type in common
            return 0.0

    def free_bytes(self) -> int:
        """What the driver says is free, and what this process holds without using it."""
        free, _ = torch.cuda.mem_get_info(self.index)
        return int(free + torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index))

    def neighbours(self) -> str:
        """Other programs by the memory that they hold."""
        free, total = torch.cuda.mem_get_info(self.index)
        others = int(total - free - torch.cuda.memory_reserved(self.index))
        return f"other programs hold {others / 1e9:.1f} GB of the GPU; end them" if others > _OTHERS_BYTES else ""

    def _cycles(self, seconds: float) -> int:
        """Cycles that take so long, which depends on the chip; 0 where a GPU cannot be made to wait."""
        try:
            _queue_sleep(_PROBE_CYCLES)  # the first one loads the kernel
            begin = self.mark()
            _queue_sleep(_PROBE_CYCLES)
            end = self.mark()
        except (AttributeError, RuntimeError):
            return 0
        self.synchronise()
        return math.ceil(_PROBE_CYCLES * seconds / max(self.elapsed(begin, end).wall, 1e-6))

    def _cache_bytes(self) -> int:
        """Enough to push everything out of the caches; no more than an eighth of the memory."""
        properties: Any = torch.cuda.get_device_properties(self.index)
        caches = _FLUSHED_CACHES * int(getattr(properties, "L2_cache_size", 0))
        least = _HIP_FLUSHED if torch.version.hip else _LEAST_FLUSHED
        return min(max(caches, least), int(properties.total_memory) // 8)

    @contextmanager
    def _fits(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise TraincastError(
                f"{what} does not fit into what is free on GPU {self.index}; end other programs on it"
            ) from None

    @property
    def _name(self) -> str:
        return f"cuda:{self.index}"


def _queue_sleep(cycles: int) -> None:
    wait: Any = torch.cuda._sleep
    wait(cycles)


def _explain_no_gpu() -> str:
    """Why torch sees no GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs alone: install a build for CUDA or ROCm"
    hidden = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in os.environ]
    if hidden:
        return (
            f"torch sees no GPU with {hidden[0]}={os.environ[hidden[0]][:60]!r}: unset it, or name a GPU that is there"
        )
    return "this machine has no CUDA or ROCm device that torch can use: see whether nvidia-smi or rocm-smi lists one"

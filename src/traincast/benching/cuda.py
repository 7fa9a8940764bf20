"""A CUDA (or ROCm) device, through `torch.cuda` alone. It has not met a GPU yet: a scripted `torch.cuda` tests it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from traincast.benching.device import Identity, Seconds
from traincast.errors import TraincastError

_FLUSHED_BYTES = 256 << 20  # several times the L2 of any GPU sold (H100: 50 MB, MI300X: 256 MB Infinity Cache)
_INTEGER_RANGE = 1024  # values of integer tensors: any small range does


class CudaDevice:
    """GPU number `index` of this machine; `locked_mhz` is the SM clock it was locked to (0: it floats)."""

    kind = "cuda"

    def __init__(self, index: int = 0, locked_mhz: float = 0.0) -> None:
        if not torch.cuda.is_available():
            raise TraincastError("this machine has no CUDA or ROCm device that torch can use; give `device='cpu'`")
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise TraincastError(f"no GPU {index}; this machine has {count}")
        self.index, self.locked_mhz = index, locked_mhz
        torch.cuda.set_device(index)
        self._flushed: torch.Tensor | None = None

    def identity(self) -> Identity:
        """The GPU by its name, and the libraries that drive it."""
        properties: Any = torch.cuda.get_device_properties(self.index)
        version: Any = torch.version
        cudnn: Any = torch.backends.cudnn
        driver = f"hip {version.hip}" if getattr(version, "hip", None) else f"cuda {version.cuda}"
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
        try:
            if kind.is_floating_point:
                return torch.randn(*shape, device=self._name, dtype=torch.float32).to(kind)
            values = min(_INTEGER_RANGE, torch.iinfo(kind).max)
            return torch.randint(values, tuple(shape), device=self._name, dtype=kind)
        except torch.cuda.OutOfMemoryError:
            raise TraincastError(
                f"a tensor of {' x '.join(map(str, shape))} {dtype} does not fit into what is free on GPU "
                f"{self.index}; end other programs on it"
            ) from None

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU."""
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

    def flush(self, nbytes: int | None = None) -> None:
        """Writes so much of a buffer, by default more than the L2 holds."""
        wanted = (_FLUSHED_BYTES if nbytes is None else nbytes) // 4
        if self._flushed is None or self._flushed.numel() < wanted:
            self._flushed = torch.zeros(max(wanted, _FLUSHED_BYTES // 4), device=self._name)
        self._flushed[:wanted].add_(1.0)

    def clock_mhz(self) -> float:
        """The SM clock now, where NVML can be asked for it."""
        try:
            return float(torch.cuda.clock_rate(self.index))
        except (ModuleNotFoundError, RuntimeError, AttributeError):  # no NVML bindings, or a driver without them
            return 0.0

    @property
    def _name(self) -> str:
        return f"cuda:{self.index}"

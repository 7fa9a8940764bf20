"""The thin interface between measuring and what is measured: a device that allocates, runs and keeps time.

Everything above it (plans, kernels, timing, storing) is the same for a CPU and a GPU. What is left in an implementation
is small enough to read in one sitting, because the one for CUDA is tested against a script of `torch.cuda` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from traincast.calibration.bench.plans import Task, plan_benchmarks
from traincast.calibration.bench.signatures import Random, draw_size, make_op, make_spec
from traincast.costs.cpu.features import get_kind
from traincast.ir.ops import Signature

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What must be equal for measurements to belong together. `locked_clock_mhz` 0 is a clock that floats."""

    device: str
    name: str
    threads: int
    locked_clock_mhz: float
    memory_bytes: int
    torch: str
    libraries: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long something took: by the clock on the wall, and how long this thread (or the GPU) was busy with it."""

    wall: float
    busy: float

    def of(self, clock: str) -> float:
        """By the clock of this name: "wall", or "busy" where neighbours take the processor away."""
        return self.busy if clock == "busy" else self.wall


class Device(Protocol):
    """A device to measure on. Marks are opaque: two of them, synchronised, say what lay between."""

    kind: str

    def identity(self) -> Identity:
        """What this device is, and the libraries that drive it."""
        ...

    def allocate(self, shape: Sequence[int], dtype: str = "float32") -> torch.Tensor:
        """A tensor of this shape on the device, filled with values that no kernel takes a short cut for."""
        ...

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host, on the device."""
        ...

    def mark(self) -> Any:
        """A point in time on the device's own time line."""
        ...

    def elapsed(self, begin: Any, end: Any) -> Seconds:
        """Time between two marks that the device has passed."""
        ...

    def synchronise(self) -> None:
        """Waits until everything that was started is done."""
        ...

    def lead(self) -> None:
        """Keeps a device that works alongside the host busy for a moment, so that what is queued meanwhile runs without
        waiting for the host."""
        ...

    def flush(self, nbytes: int | None = None) -> None:
        """Touches this many bytes of other data: with None enough to empty the caches of what earlier work left
        there."""
        ...

    def clock_mhz(self) -> float:
        """The clock it runs at now; 0 where it cannot be read."""
        ...

    def free_bytes(self) -> int:
        """Memory that new tensors can have; a very large number where nobody says."""
        ...

    def neighbours(self) -> str:
        """Who else uses it, in words; "" for nobody, or where only the clocks of a run tell."""
        ...


def run_timed(
    device: Device, work: Callable[[], object], prepare: Callable[[], object] = lambda: None, *, queued: bool = False
) -> Seconds:
    """How long the device takes for this work, from nothing queued but `prepare` to all of it done. With `queued` the
    host's time to launch it is left out: a GPU is kept busy until the host is done."""
    device.synchronise()
    prepare()
    if queued:
        device.lead()
    begin = device.mark()
    work()
    end = device.mark()
    device.synchronise()
    return device.elapsed(begin, end)


_TYPES = ("float32", "bfloat16", "float16")
_ENLARGED = 0.5  # of the samples; launches of small ones are a part of steps too
_LEAST_FLOPS, _MOST_FLOPS = 1e9, 4e11  # of a product: 20 ms of an A100 in fp32
_MOST_BYTES = 1 << 28  # of a tensor


def plan_gpu_benchmarks(seed: int = 0) -> Iterator[Task]:
    """Microbenchmarks without end; the same for the same seed."""
    for number, task in enumerate(plan_benchmarks(seed)):
        random = np.random.default_rng((seed, 17, number))
        yield (
            replace(task, signature=_enlarge_signature(task.signature, random)) if random.random() < _ENLARGED else task
        )


def _enlarge_signature(signature: Signature, random: Random) -> Signature:
    """Products and ops on tensors of one shape, larger and in one of the types that models are trained in; others as
    they are."""
    dtype = str(random.choice(_TYPES))
    if get_kind(signature) == "gemm":
        return _enlarge_gemm(signature, random, dtype)
    tensors = (*signature.inputs, *signature.outputs)
    shape = tensors[0].shape
    if not shape or any(one.shape != shape or one.dtype != "float32" or not one.is_contiguous for one in tensors):
        return signature
    most = _MOST_BYTES // max(tensors[0].nbytes, 1)
    longer = make_spec(shape[0] * max(1, min(most, 1 << int(random.integers(9)))), *shape[1:], dtype=dtype)
    return replace(signature, inputs=(longer,) * len(signature.inputs), outputs=(longer,) * len(signature.outputs))


def _enlarge_gemm(signature: Signature, random: Random, dtype: str) -> Signature:
    while True:
        m, n, k = draw_size(random, 128, 65536), draw_size(random, 64, 16384), draw_size(random, 64, 16384)
        if _LEAST_FLOPS < 2.0 * m * n * k < _MOST_FLOPS:
            break
    out = make_spec(m, n, dtype=dtype)
    if signature.name == "aten::addmm":
        weight = make_spec(k, n, dtype=dtype, transposed=True)
        tensors = [("self", make_spec(n, dtype=dtype)), ("mat1", make_spec(m, k, dtype=dtype)), ("mat2", weight)]
        return make_op("addmm", tensors, [out], beta=1, alpha=1)
    left, right = (not given.is_contiguous for given in signature.inputs)
    tensors = [
        ("self", make_spec(m, k, dtype=dtype, transposed=left)),
        ("mat2", make_spec(k, n, dtype=dtype, transposed=right)),
    ]
    return make_op("mm", tensors, [out])

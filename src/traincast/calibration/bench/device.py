"""The interface between measuring and what is measured, and the timing loop: repetitions alongside a reference kernel,
so that drift divides out.

Everything above it (plans, kernels, timing, storing) is the same for a CPU and a GPU. What is left in an implementation
is small enough to read in one sitting, because the one for CUDA is tested against a script of `torch.cuda` only.

On a shared machine the time of one and the same step drifts by 30 % within minutes, its ratio to a GEMM that is timed
alongside it by 2 %. So every sample is kept with the reference before and after it, and what counts is the median of
the ratios; seconds are ratios times the reference's own median.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from traincast.calibration.bench.plans import Task, plan_benchmarks
from traincast.calibration.bench.signatures import Random, draw_size, make_op, make_spec
from traincast.costs.cpu.features import get_kind
from traincast.ir.ops import Signature
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError

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


CLOCKS = ("wall", "busy")
_REFERENCE_SIDE = {"cpu": 384, "cuda": 2048}  # about a millisecond of fp32 product on a core, and on a GPU (V100, A100)
BUSY_NEIGHBOURS = 1.05  # the wall's clock this far ahead of the thread's: someone else had the processor
DRIFTED = 1.10  # the reference in one quarter of the run against another
_WARMING_SECONDS = 0.2  # of references before a clock is read: an idle device rests below its clock
_MOST_WARMING = 1000
_CLOCK_TOLERANCE = 0.03
_FEWEST_FOR_DRIFT = 8  # repetitions
_NOTHINGS = 9  # times of no work
_Z90 = NormalDist().inv_cdf(0.95)


class Reference:
    """One fp32 GEMM on operands of its own: the yardstick of its `device`."""

    def __init__(self, device: Device) -> None:
        import torch

        side = _REFERENCE_SIDE[device.kind]
        left, right, out = (device.allocate((side, side)) for _ in range(3))
        self.device = device
        self._work: Callable[[], Any] = lambda: torch.mm(left, right, out=out)
        with use_full_precision():
            for _ in range(3):  # libraries choose and load their kernels at the first calls
                self._work()

    def seconds(self) -> Seconds:
        """The product once more, its operands in the cache: run twice, timed the second time."""
        with use_full_precision():
            self._work()
            return run_timed(self.device, self._work, queued=True)

    @cached_property
    def nothing(self) -> Seconds:
        """What timing adds to a call, as it is timed alongside this reference: the least of a few times of no work at
        all. The same for a whole run."""
        none = run_series(self.device, self, lambda: None, repeats=_NOTHINGS, queued=True)
        return Seconds(float(none.wall.min()), float(none.busy.min()))

    def clock_mhz(self) -> float:
        """The device's clock while it works, after it has warmed up; 0 where it cannot be read."""
        if not self.device.clock_mhz():
            return 0.0
        many = math.ceil(_WARMING_SECONDS / max(self.seconds().wall, 1e-6))
        with use_full_precision():
            for _ in range(min(many, _MOST_WARMING)):
                self._work()
            now = self.device.clock_mhz()  # before waiting: GEMMs are still under way
        self.device.synchronise()
        return now


@contextmanager
def use_full_precision() -> Iterator[None]:
    """fp32 GEMMs in fp32, whatever the step alongside them has chosen (TF32 on a GPU, bf16 on a CPU)."""
    import torch

    settings = _find_precision_switches()
    if not settings:  # before PyTorch 2.9, which warns of the older switch and rejects to read it alongside its own
        chosen = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(chosen)
        return
    held = [one.fp32_precision for one in settings]
    try:
        for one in settings:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, chosen in zip(settings, held, strict=True):
            one.fp32_precision = chosen


def _find_precision_switches() -> list[Any]:
    """Where libraries are told how to multiply fp32 numbers; none where PyTorch has one switch for all."""
    import torch

    places = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return [place for place in places if hasattr(place, "fp32_precision")]


def check_locked(device: Device, now: float) -> list[str]:
    """Rejects a device that runs at another clock (`now`, MHz) than the one it is said to be locked to; what to say
    where nobody can tell."""
    locked = device.identity().locked_clock_mhz
    if not locked:
        return []
    if not now:
        return [
            f"nobody here can be asked for the clock (pip install nvidia-ml-py): {locked:.0f} MHz is taken on trust"
        ]
    if abs(now / locked - 1.0) > _CLOCK_TOLERANCE:
        raise TraincastError(
            f"the device runs at {now:.0f} MHz, not at {locked:.0f}; lock it (nvidia-smi -lgc {locked:.0f}) or leave "
            "out `clock_mhz`"
        )
    return []


@dataclass(frozen=True, eq=False, slots=True)
class Series:
    """Repetitions of one piece of work: seconds of each by both clocks, and of the reference alongside it."""

    wall: FloatArray
    busy: FloatArray
    reference_wall: FloatArray
    reference_busy: FloatArray

    def seconds(self, clock: str) -> FloatArray:
        """Seconds of each repetition."""
        return self.busy if clock == "busy" else self.wall

    def reference(self, clock: str) -> FloatArray:
        """Seconds of the reference alongside each."""
        return self.reference_busy if clock == "busy" else self.reference_wall

    def ratios(self, clock: str) -> FloatArray:
        """Each repetition in units of its reference."""
        return self.seconds(clock) / self.reference(clock)

    def of_each(self, many: int) -> Series:
        """The same of one step, where this many were timed together."""
        return Series(self.wall / many, self.busy / many, self.reference_wall, self.reference_busy)

    def notes(self) -> tuple[str, ...]:
        """What disturbed the run: neighbours on the processor, a clock that moved."""
        pairs = ((self.wall, self.busy), (self.reference_wall, self.reference_busy))  # short steps are seldom cut off
        waited = max(float(np.median(wall / np.maximum(busy, 1e-12))) for wall, busy in pairs)
        if waited <= BUSY_NEIGHBOURS:
            return self.drift()
        return (f"other programs had the processor for {1 - 1 / waited:.0%} of the time; end them", *self.drift())

    def drift(self) -> tuple[str, ...]:
        """What moved the clock, or the reference otherwise."""
        moved = compute_drift(self.reference_busy)
        if moved <= DRIFTED:
            return ()
        return (
            f"the reference drifted by {moved - 1:.0%} (throttling or neighbours); the corrected figure has it divided "
            "out",
        )


def compute_drift(reference: FloatArray) -> float:
    """How far the slowest quarter of a run is from its fastest, as a factor; 1 for a run too short to say."""
    if len(reference) < _FEWEST_FOR_DRIFT:
        return 1.0
    medians = [float(np.median(quarter)) for quarter in np.array_split(reference, 4)]
    return max(medians) / min(medians)


def run_series(
    device: Device,
    reference: Reference,
    work: Callable[[], object],
    *,
    repeats: int,
    seconds: float = math.inf,
    least: int = 3,
    prepare: Callable[[], object] = lambda: None,
    queued: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> Series:
    """Times `work` up to `repeats` times (at least `least`), each after `prepare`, which is not timed; ends early once
    `seconds` have passed. `queued` is for kernels alone, see `run_timed`."""
    rows: list[tuple[float, float, float, float]] = []
    start = time.monotonic()
    before = reference.seconds()
    while len(rows) < repeats and (len(rows) < least or time.monotonic() - start < seconds):
        taken = run_timed(device, work, prepare, queued=queued)
        after = reference.seconds()
        rows.append((taken.wall, taken.busy, math.sqrt(before.wall * after.wall), math.sqrt(before.busy * after.busy)))
        before = after
        progress(max(len(rows) / repeats, min(1.0, (time.monotonic() - start) / seconds)))
    return Series(*np.array(rows).T)


@dataclass(frozen=True, slots=True)
class Summary:
    """A series in a few figures. `median` and `corrected` are seconds, `low` and `high` the 90 % confidence interval
    of `corrected`, `spread` the robust relative deviation of single repetitions after correction."""

    repeats: int
    median: float
    corrected: float
    low: float
    high: float
    spread: float
    reference: float


def summarise_series(series: Series, clock: str, nominal: float | None = None) -> Summary:
    """The figures of a series; ratios become seconds of a machine whose reference takes `nominal` seconds (None: the
    median of this run)."""
    nominal = float(np.median(series.reference(clock))) if nominal is None else nominal
    ratios = np.sort(series.ratios(clock))
    low, high = compute_median_interval(ratios)
    middle = float(np.median(ratios))
    deviation = 1.4826 * float(np.median(np.abs(ratios - middle)))  # of a normal distribution
    return Summary(
        repeats=len(ratios),
        median=float(np.median(series.seconds(clock))),
        corrected=nominal * middle,
        low=nominal * low,
        high=nominal * high,
        spread=deviation / middle,
        reference=nominal,
    )


def compute_median_interval(ordered: FloatArray) -> tuple[float, float]:
    """The 90 % confidence interval of the median: order statistics, for any distribution (wide when there are few)."""
    count = len(ordered)
    reach = 0.5 * _Z90 * math.sqrt(count)
    first = max(math.floor(0.5 * (count - 1) - reach), 0)
    last = min(math.ceil(0.5 * (count - 1) + reach), count - 1)
    return float(ordered[first]), float(ordered[last])

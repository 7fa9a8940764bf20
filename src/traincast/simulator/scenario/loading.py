"""The stage before a step: batches that workers make, and copies to the device from pageable or pinned memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from traincast.ir.ops import Signature
from traincast.ir.workload import LOADER, Workload
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.warnings import Note
from traincast.utils.errors import TraincastError

_COPIES = ("aten::_to_copy", "aten::copy_", "aten::to")
_MOST_MS, _MOST_WORKERS = 1e6, 4096
_HEADROOM = 1e-9  # seconds: a loader as fast as the step holds nobody up


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """How batches come. One takes `ms` milliseconds to make; `workers` processes make them side by side, ahead of the
    step (0: the training process itself makes each before its step). `pageable`: they are copied from pageable memory,
    which the host waits for; else from pinned memory."""

    ms: float = 0.0
    workers: int = 0
    pageable: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ms <= _MOST_MS:
            raise TraincastError(f"`loader_ms` {self.ms:g} is out of range; give 0 to {_MOST_MS:g} milliseconds")
        if not 0 <= self.workers <= _MOST_WORKERS:
            raise TraincastError(f"`workers` {self.workers} is out of range; give 0 to {_MOST_WORKERS}")

    def late(self, batches: int) -> float:
        """Seconds that the training process spends on the batches of a step before it."""
        return 0.0 if self.workers else 1e-3 * self.ms * batches

    @property
    def period(self) -> float:
        """Seconds from one batch of the workers to the next; 0 without workers."""
        return 1e-3 * self.ms / self.workers if self.workers else 0.0

    def feed_workload(self, workload: Workload) -> Workload:
        """The workload with its inputs copied as this loader has them."""
        if not self.pageable:
            return workload
        fed = make_inputs_pageable(workload)
        if [p.symbolic for p in fed.programs] == [p.symbolic for p in workload.programs]:
            raise TraincastError(
                f"{workload.name} copies no inputs from pinned memory, which `pageable` is about; leave it out"
            )
        return fed

    def limit_prediction(self, result: Prediction, batches: int) -> Prediction:
        """The result, as long as its batches take where workers are slower than the step."""
        notes: tuple[str, ...] = ()
        late = self.late(batches)
        if late:
            made = "its batch" if batches == 1 else f"its {batches} batches"
            notes = (Note(f"every step begins {1e3 * late:g} ms late, in which the training process makes {made}"),)
        period = self.period * batches
        if period > result.iteration + _HEADROOM:
            every = "a batch" if batches == 1 else f"{batches} batches"
            held = f"the data loader holds the step up: {every} every {1e3 * period:.3g} ms from {self.workers} workers"
            notes = (
                Note(f"{held}, for a step of {1e3 * result.iteration:.3g} ms; its time is as given, without interval"),
            )
            longer = period - result.iteration
            result = replace(
                result, iteration=period, interval=(period, max(period, result.interval[1])),
                device_idle=result.device_idle + longer,
            )  # fmt: skip
        return replace(result, warnings=(*result.warnings, *notes)) if notes else result


def read_traced_loader(workload: Workload, asked: Loader) -> Loader:
    """The loader that a traced step waited for, where it says so, else the one asked for."""
    milliseconds, _, workers = workload.meta.get(LOADER, "").partition(" ")
    try:
        return replace(asked, ms=float(milliseconds), workers=int(workers)) if milliseconds else asked
    except ValueError:
        raise TraincastError(f"{workload.name} does not say how its batches came: '{LOADER}' is no number") from None


def count_batches(workload: Workload) -> int:
    """Batches that a step wants: several where gradients of several are accumulated."""
    return max(1, workload.samples // workload.batch_size)


def make_inputs_pageable(workload: Workload) -> Workload:
    """The workload with every copy to the device made from pageable memory."""
    programs = tuple(
        replace(program, symbolic=tuple(map(_make_pageable, program.symbolic))) for program in workload.programs
    )
    return replace(workload, programs=programs)


def _make_pageable(signature: Signature) -> Signature:
    if signature.name not in _COPIES or not any(spec.device == "cpu:pinned" for spec in signature.inputs):
        return signature
    inputs = tuple(
        replace(spec, device="cpu") if spec.device == "cpu:pinned" else spec for spec in signature.inputs
    )  # fmt: skip
    return replace(signature, inputs=inputs)

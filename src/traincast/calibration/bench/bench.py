"""Microbenchmarks, one after the other, into the store: resumed where they stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from math import inf
from typing import Any

import numpy as np

from traincast.calibration.bench.calls import OpCall
from traincast.calibration.bench.copies import CopyCall, CopyTask
from traincast.calibration.bench.device import Device
from traincast.calibration.bench.plans import FAR_BYTES, Task
from traincast.calibration.bench.store import Store
from traincast.calibration.bench.timing import Reference, run_series, summarise_series
from traincast.costs.cpu.samples import Sample, format_signature
from traincast.ir.ops import Signature
from traincast.models.embeddings.access import Uniform, parse_access
from traincast.models.embeddings.draws import draw_rows
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError

_REPEATS, _COPY_REPEATS = 5, 9  # of one visit: most ops get two, minutes apart, copies one
_MOST_SECONDS = 0.12  # for one sample's repetitions: those of long ops are alike, and another shape says more
_MEMORY_SHARE = 0.8  # of what is free that operands may take


def make_task_key(task: Task) -> str:
    """A name for a task that is the same in every run."""
    text = f"{format_signature(task.signature)}|{task.between}|{task.code_far}|{task.access}"
    return blake2b(text.encode(), digest_size=12).hexdigest()


def run_benchmarks(
    device: Device,
    store: Store,
    tasks: Iterable[Task],
    *,
    seconds: float = inf,
    failed: Callable[[Task, str], None] = lambda *_: None,
    progress: Callable[[float], None] = lambda _: None,
    turn: str = "",
) -> int:
    """Measures tasks that the store does not hold until `seconds` have passed or none is left; how many were.

    An op that cannot be run on made-up operands, or has no room, is told to `failed` and left out. What
    is measured in another `turn` stands alongside what was measured before.
    """
    reference = Reference(device)
    start, done = time.monotonic(), 0
    for task in tasks:
        if time.monotonic() - start >= seconds:
            break
        key = make_task_key(task) + turn
        if key not in store:
            try:
                sample = measure_task(device, reference, task)
            except (RuntimeError, IndexError, TypeError, TraincastError) as error:  # it wants values we do not know
                notes = " ".join(str(error).split())[:120]
                _check_alive(device, task.signature.name, notes)
                failed(task, notes)
                continue
            store.append(key, sample)
            done += 1
        progress(min(1.0, (time.monotonic() - start) / seconds))
    store.merge()
    return done


def _check_alive(device: Device, op: str, notes: str) -> None:
    """Ends the run where an op has left the device in a state in which nothing works any more."""
    try:
        device.synchronise()
    except RuntimeError:
        raise TraincastError(
            f"the device answers nothing since {op} failed ({notes}); what was measured is kept: run the same command "
            "with another `seed`, and report the op"
        ) from None


def measure_task(device: Device, reference: Reference, task: Task) -> Sample:
    """One microbenchmark: single calls, each in the state that the task asks for, alongside the reference; medians."""
    needed, free = _count_operand_bytes(task.signature), device.free_bytes()
    if needed > _MEMORY_SHARE * free:
        raise TraincastError(f"its operands take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    call = OpCall(
        task.signature, device, sets=2 if task.between and not task.code_far else 1, rows=_make_row_drawer(task.access)
    )
    return _measure_call(device, reference, call, task)


def _count_operand_bytes(signature: Signature) -> int:
    """Bytes of the operands of two calls."""
    return 2 * sum(tensor.nbytes for tensor in (*signature.inputs, *signature.outputs))


def measure_copy(device: Device, reference: Reference, task: CopyTask) -> Sample:
    """One copy between host and device, its buffers from memory."""
    return _measure_call(
        device, reference, CopyCall(task, device, sets=2), Task(task.signature, FAR_BYTES), _COPY_REPEATS
    )


def _measure_call(
    device: Device, reference: Reference, call: Callable[[int], object], task: Task, repeats: int = _REPEATS
) -> Sample:
    """A call finds its operands as a step does: touched once, then other data, then, unless the op's code is to be far
    as well, another call of the same op on operands of its own, and then small ops of other kinds, so that at least
    the code that all ops share is at hand."""
    others = _make_other_ops(device)

    def prepare() -> None:
        call(0)
        if task.between:
            device.flush(task.between)
            if not task.code_far:
                call(1)
        others()

    series = run_series(
        device, reference, lambda: call(0), repeats=repeats, seconds=_MOST_SECONDS, prepare=prepare, queued=True
    )
    nothing = reference.nothing
    return Sample(
        signature=task.signature, between=task.between, code_far=task.code_far, access=task.access,
        wall=_correct_for_reference(series.wall - nothing.wall, series.reference_wall),
        busy=_correct_for_reference(series.busy - nothing.busy, series.reference_busy),
        reference_wall=float(np.median(series.reference_wall)),
        reference_busy=float(np.median(series.reference_busy)),
        spread=summarise_series(series, "busy").spread,
    )  # fmt: skip


def _make_other_ops(device: Device) -> Callable[[], object]:
    """A few small ops of different kinds, which push the code of the last call out of the innermost cache."""
    import torch

    small = device.allocate((24, 24))

    def run() -> None:
        torch.cat([torch.relu(torch.mm(small, small)), small.t().contiguous()])
        torch.softmax(small.sum(dim=0) * 0.5, dim=0).sigmoid_().add_(1.0)
        torch.embedding(small, torch.zeros(4, dtype=torch.int64, device=small.device)).mean()

    return run


def _correct_for_reference(seconds: FloatArray, reference: FloatArray) -> float:
    """Seconds at the median reference: the median ratio times it."""
    return float(np.median(seconds / reference) * np.median(reference))


def _make_row_drawer(access: str) -> Callable[[int, int], Any]:
    random = np.random.default_rng(0)
    distribution = parse_access(access) if access else Uniform()
    return lambda rows, lookups: draw_rows(distribution, rows, lookups, random)

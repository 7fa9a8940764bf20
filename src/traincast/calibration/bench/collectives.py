"""Collectives, and copies between host and GPU, as microbenchmarks: which, at which sizes, and the calls themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from traincast.calibration.bench.device import Device
from traincast.costs.cpu.collectives import CpuCollective
from traincast.costs.cpu.samples import COPY_DIRECTIONS, COPY_MEMORIES, make_copy_signature
from traincast.ir.ops import Signature
from traincast.utils.errors import make_unknown_error

# PyTorch 2.13 renamed both
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
KINDS = ("all_reduce", "all_to_all_v", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
"""Every collective that is measured, those of hybrid-parallel DLRMs first."""
LEAST_BYTES, MOST_BYTES = 1 << 12, 1 << 25
"""Messages that are measured: below, latency alone counts; beyond, time goes with the bytes."""
_ITEM = 4  # bytes of fp32
_GOLDEN = 0.6180339887498949  # steps of it fill an interval evenly, however many are taken


def plan_collectives(ranks: int, seed: int = 0) -> Iterator[list[CpuCollective]]:
    """Collectives without end, every kind in turn, at sizes that are even in their logarithm however many are taken."""
    first = float(np.random.default_rng((seed, ranks)).random())
    for turn in count():
        for number, kind in enumerate(KINDS):
            share = (first + _GOLDEN * turn + number / len(KINDS)) % 1.0
            size = LEAST_BYTES * (MOST_BYTES / LEAST_BYTES) ** share
            elements = max(ranks, int(size) // _ITEM // ranks * ranks)
            if kind != "all_to_all_v":
                yield [CpuCollective(kind, _ITEM * elements)] * ranks
                continue
            random = np.random.default_rng((seed, ranks, turn))
            parts = random.uniform(0.1, 1.0, ranks)  # what every rank sends to each, as of the tables that it holds
            sent = [max(1, int(elements * part / parts.sum())) * _ITEM for part in parts]
            yield [CpuCollective(kind, _ITEM * elements, (size,) * ranks) for size in sent]


def make_collective_job(exchanges: Sequence[CpuCollective], seconds: float) -> dict[str, Any]:
    """One collective as a job."""
    first = exchanges[0]
    sent = [list(exchange.sent) for exchange in exchanges] if first.sent else []
    return {"collective": first.kind, "bytes": first.message_bytes, "sent": sent, "seconds": seconds}


def list_job_collectives(job: dict[str, Any], ranks: int) -> list[CpuCollective]:
    """What every rank calls for a job."""
    rows = job.get("sent") or [()] * ranks
    return [CpuCollective(str(job["collective"]), int(job["bytes"]), tuple(row)) for row in rows]


def make_collective_call(job: dict[str, Any], rank: int, ranks: int, device: Device) -> Callable[[], object]:
    """One call of the collective of a job. Its bytes mean what `workload.collectives` says: the whole buffer that is
    reduced, sent by a rank, or gathered. Sums are of zeros, which do not grow."""
    kind = str(job["collective"])
    elements = max(ranks, int(job["bytes"]) // _ITEM // ranks * ranks)
    if kind == "all_to_all_v":
        return _make_uneven_all_to_all([[size // _ITEM for size in row] for row in job["sent"]], rank, device)
    whole, other = (device.allocate((elements,)).zero_() for _ in range(2))
    part = device.allocate((elements // ranks,)).zero_()
    works: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: all_gather(other, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send_recv": lambda: _send_to_second(whole, rank),
    }
    if kind not in works:
        raise make_unknown_error("collective", kind, works, f"Choose from {', '.join(works)}.")
    return works[kind]


def _make_uneven_all_to_all(sent: list[list[int]], rank: int, device: Device) -> Callable[[], object]:
    received = [row[rank] for row in sent]
    whole, other = device.allocate((sum(sent[rank]),)), device.allocate((sum(received),))
    return lambda: dist.all_to_all_single(other, whole, received, sent[rank])


def _send_to_second(whole: torch.Tensor, rank: int) -> None:
    """From the first rank to the second."""
    if rank == 0:
        dist.send(whole, 1)
    elif rank == 1:
        dist.recv(whole, 0)


class DifferentiableAllToAll(torch.autograd.Function):
    """A flat tensor of which rank r gets `sent[r]` elements and sends `received[r]`; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """What the other ranks sent, in the order of ranks."""
        ctx.sent, ctx.received = list(sent), list(received)
        return _run_all_to_all(flat, ctx.sent, ctx.received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Gradients of what was sent: means over the ranks, as DDP makes of the others."""
        return _run_all_to_all(grads[0] / len(ctx.sent), ctx.received, ctx.sent), None, None


class Summed(torch.autograd.Function):
    """Partial sums [samples of all ranks, columns]: every rank gets the sums of its own samples."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor) -> torch.Tensor:
        """The sums of this rank's samples."""
        own = partial.new_empty(partial.shape[0] // dist.get_world_size(), partial.shape[1])
        reduce_scatter(own, partial)
        return own

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients of all ranks' samples, as means over the ranks."""
        grad = grads[0].contiguous() / dist.get_world_size()
        everyone = grad.new_empty(grad.shape[0] * dist.get_world_size(), grad.shape[1])
        all_gather(everyone, grad)
        return everyone


def _run_all_to_all(flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    arrived = flat.new_empty(sum(received))
    dist.all_to_all_single(arrived, flat, received, sent)
    return arrived


LEAST_COPY_BYTES, MOST_COPY_BYTES = 1 << 12, 1 << 26
"""Copies that are measured, from a batch's labels to large batches."""
_WAYS = tuple((direction, memory) for direction in COPY_DIRECTIONS for memory in COPY_MEMORIES)


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One copy to time."""

    direction: str
    memory: str
    nbytes: int

    @property
    def key(self) -> str:
        """A name that is the same in every run."""
        return f"copy-{self.direction}-{self.memory}-{self.nbytes}".replace(" ", "-")

    @property
    def signature(self) -> Signature:
        """The copy as a sample has it."""
        return make_copy_signature(self.direction, self.memory, self.nbytes)


def list_copy_ways(kind: str) -> tuple[tuple[str, str], ...]:
    """How copies go on a kind of device: (direction, memory of the host)."""
    return _WAYS if kind == "cuda" else ()


def plan_copies(kind: str, seed: int = 0) -> Iterator[CopyTask]:
    """Copies without end for a kind of device, every way in turn, at sizes that are even in their logarithm."""
    first = float(np.random.default_rng((seed, 13)).random())
    for turn in count() if list_copy_ways(kind) else ():
        size = LEAST_COPY_BYTES * (MOST_COPY_BYTES / LEAST_COPY_BYTES) ** ((first + _GOLDEN * turn) % 1.0)
        for direction, memory in list_copy_ways(kind):
            yield CopyTask(direction, memory, int(size) // 64 * 64)


class CopyCall:
    """A copy, on any of several equal pairs of buffers."""

    def __init__(self, task: CopyTask, device: Device, *, sets: int) -> None:
        self._asynchronous = task.memory == "pinned"
        self._pairs = [_allocate_copy_buffers(task, device) for _ in range(sets)]

    def __call__(self, number: int = 0) -> None:
        """Copies once."""
        target, source = self._pairs[number]
        target.copy_(source, non_blocking=self._asynchronous)


def _allocate_copy_buffers(task: CopyTask, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a copy goes, and where it comes from."""
    there = device.allocate((task.nbytes,), "uint8")
    host = torch.ones(task.nbytes, dtype=torch.uint8)  # zeros could be pages that nobody has written yet
    if task.memory == "pinned":
        host = host.pin_memory()
    return (there, host) if task.direction == "to device" else (host, there)

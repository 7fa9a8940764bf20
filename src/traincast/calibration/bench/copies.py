"""Copies between host and GPU as microbenchmarks, from pinned and pageable memory; a CPU has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from traincast.calibration.bench.device import Device
from traincast.costs.cpu.samples import COPY_DIRECTIONS, COPY_MEMORIES, make_copy_signature
from traincast.ir.ops import Signature

LEAST_BYTES, MOST_BYTES = 1 << 12, 1 << 26
"""Copies that are measured, from a batch's labels to large batches."""
_WAYS = tuple((direction, memory) for direction in COPY_DIRECTIONS for memory in COPY_MEMORIES)
_GOLDEN = 0.6180339887498949  # steps of it fill an interval evenly, however many are taken


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
        size = LEAST_BYTES * (MOST_BYTES / LEAST_BYTES) ** ((first + _GOLDEN * turn) % 1.0)
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

"""What a step needs of a device: allocated, active, reserved and used bytes, replayed until they no longer grow, and
whether they fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from traincast.hardware.device import AMPERE, HOPPER, Device
from traincast.ir.memory import CATEGORIES, Memory, MemoryEvents, group_layers
from traincast.ir.workload import DEFAULT_FRAMEWORK
from traincast.simulator.memory.allocator import (
    LARGE_SEGMENT,
    UNLIMITED,
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemoryError,
)
from traincast.utils.metrics import Z90

_MIB = 1 << 20
_CONTEXT_MIB = {"newest": 600, "before": 560, "older": 400, "amd": 900}
"""CUDA context with the modules that a training step loads, lazily. Bare ones take 426 MiB on an RTX 6000 Ada (PyTorch
2.10, unslothai/unsloth-zoo#1053) and 274 (pytorch#86509); TorchRec's benchmark uses 570 to 580 beyond what is reserved
where no GPU communicates. Set by hand with these in view."""
_EAGER_MIB = 400
"""More where all modules are loaded at once: before PyTorch 1.13 (636 MiB instead of 274, pytorch#86509)."""
_BUFFER_BYTES = (4 << 20) + (512 << 10) + 4_915_200
"""Buffers of one peer in one channel: of NCCL's protocols Simple (NCCL_BUFFSIZE), LL and LL128, by its source."""
_PEERS = 3  # that a rank receives from where it reduces or gathers: one in the ring, two in trees
_CHANNELS, _CHANNELS_BEFORE_AMPERE, _CHANNELS_PCIE = 24, 12, 2
_SENDING_CHANNELS = 32  # of messages and all-to-all, whatever the number of ranks: TorchRec's use 290 MiB
CONTEXT_SPREAD = 0.5
"""Log-sigma of both: they depend on driver, release and which kernels were loaded."""
_HANDLES = 2  # of cuBLAS: one of the thread that runs forward, one of autograd's
_CUBLAS_BYTES = (2 * 4096 + 8 * 16) * 1024
"""PyTorch's default workspace of a cuBLAS handle (`:4096:2:16:8`)."""
_CUBLAS_HOPPER_BYTES = 32 * _MIB
"""That of Hopper and later."""


class Communicators(NamedTuple):
    """Groups of ranks in which a process reduces or gathers, and in which it sends to single ranks or all to all."""

    reducing: int = 0
    sending: int = 0


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes outside of the allocator: the context with loaded modules, and buffers of communicators."""

    context: float
    communicators: float

    @property
    def total(self) -> float:
        """Both."""
        return self.context + self.communicators

    def to_dict(self) -> dict[str, Any]:
        """In GB."""
        return {"context_gb": self.context / 1e9, "communicators_gb": self.communicators / 1e9}


def estimate_process_memory(
    device: Device, communicators: Communicators, framework: str = DEFAULT_FRAMEWORK
) -> ProcessMemory:  # fmt: skip
    """What a process on a device holds that communicates in these groups of ranks."""
    if device.vendor != "nvidia":
        kind = "amd"
    elif device.is_capability_at_least(HOPPER):
        kind = "newest"
    else:
        kind = "before" if device.is_capability_at_least(AMPERE) else "older"
    eager = kind in ("before", "older") and framework.startswith("1.") and not framework.startswith("1.13")
    channels, sending = _CHANNELS, _SENDING_CHANNELS
    if not device.nvlink_bandwidth:
        channels = sending = _CHANNELS_PCIE
    elif kind == "older":
        channels = _CHANNELS_BEFORE_AMPERE
    peers = communicators.reducing * _PEERS * channels + communicators.sending * sending
    return ProcessMemory((_CONTEXT_MIB[kind] + eager * _EAGER_MIB) * _MIB, float(peers * _BUFFER_BYTES))


def add_workspaces(events: MemoryEvents, device: Device, framework: str = DEFAULT_FRAMEWORK) -> MemoryEvents:
    """The step with the workspaces of cuBLAS, which PyTorch allocates when a handle is first used. Up to PyTorch 1.13
    cuBLAS had its own, outside of the allocator."""
    if device.is_cpu or not events.ticks or framework.startswith("1."):
        return events
    size = _CUBLAS_HOPPER_BYTES if device.is_capability_at_least(HOPPER) else _CUBLAS_BYTES
    labels = (*events.labels, "cuBLAS")
    return events.add_blocks(
        np.full(_HANDLES, size), born=-1, gone=events.ticks, appears=0, label=len(events.labels), labels=labels
    )


MOST_STEPS = 4
"""Steps that are replayed at most: fragmentation is stable after two or three."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator did: peaks in bytes over all steps (`held`: of segments with a block in use), their number,
    how often it gave its cache back to the driver, and what a block that did not fit wanted (0: all fitted)."""

    allocated: int
    active: int
    held: int
    reserved: int
    steps: int
    retries: int
    missing: int
    allocator: CachingAllocator


def replay_steps(
    events: MemoryEvents, settings: AllocatorSettings | None = None, *, capacity: int = UNLIMITED
) -> Replay:
    """Replays steps on a device that can give `capacity` bytes."""
    allocator = CachingAllocator(settings, capacity)
    step, missing = StepReplay(events, allocator), 0
    steps = 1
    try:
        step.allocate_resident()
        for steps in range(1, MOST_STEPS + 1):
            before = allocator.reserved
            step.run(first=steps == 1)
            if steps > 1 and allocator.reserved == before:
                break
    except OutOfMemoryError as error:
        missing = error.wanted
    return Replay(
        allocator.peak_allocated, allocator.peak_active, allocator.peak_held, allocator.peak_reserved, steps,
        allocator.retries, missing, allocator,
    )  # fmt: skip


class StepReplay:
    """Steps of one rank on one allocator."""

    def __init__(self, events: MemoryEvents, allocator: CachingAllocator) -> None:
        self.events, self.allocator, self.now = events, allocator, -1
        self.held: list[Block | None] = [None] * len(events.nbytes)
        self.sizes, self.streams = events.nbytes.tolist(), list_block_streams(events)
        self.handed_on = _pair_steps(events)
        leaves = np.flatnonzero((events.born >= 0) & (events.gone >= events.ticks)).tolist()
        self.dropped = sorted(set(leaves) - {made for made, _ in self.handed_on})

    def allocate_resident(self) -> None:
        """What is there before the first step, in the order in which it is made."""
        for number in np.flatnonzero((self.events.born < 0) & (self.events.appears < 0)).tolist():
            self.held[number] = self.allocator.allocate(self.sizes[number], self.streams[number], number)

    def run(self, *, first: bool) -> None:
        """One step; the device is done with it before the next one begins. What it leaves and the next one does not
        find (gradients that are set to None) goes in between."""
        held, allocator, sizes, streams = self.held, self.allocator, self.sizes, self.streams
        late, allocate, free = self.events.late, allocator.allocate, allocator.free
        for tick, number, comes in list_step_events(self.events, first=first):
            if comes:
                self.now = tick
                held[number] = allocate(sizes[number], streams[number], number)
            elif (block := held[number]) is not None:  # else it is there before the first step only
                held[number] = None
                if late and number in late:
                    self.now = tick
                    allocator.record_stream(block, block.stream + 1)
                    free(block, partial(self._has_reached, late[number]))
                else:
                    free(block)
        allocator.synchronize()
        for made, found in self.handed_on:
            held[found], held[made] = held[made], None
        for number in self.dropped:
            block = held[number]
            if block is not None:
                allocator.free(block)
                held[number] = None

    def _has_reached(self, tick: int) -> bool:
        return self.now >= tick


def list_block_streams(events: MemoryEvents) -> list[int]:
    """The stream of every block: what is there before a step was made in the step before, by one like it."""
    streams: list[int] = events.stream.tolist()
    for made, found in _pair_steps(events):
        streams[found] = streams[made]
    return streams


@lru_cache(maxsize=4)  # of searches that replay one step again and again
def _pair_steps(events: MemoryEvents) -> list[tuple[int, int]]:
    """Blocks that a step leaves to the next one (a batch that was fetched ahead, gradients, the loss with its graph),
    each with the block that is there before a step and goes in it: the same one, a step later. Of blocks of one size
    those of the same category come first; a step finds what the one before made among its inputs."""
    left: dict[int, list[int]] = {}
    for number in np.flatnonzero((events.born < 0) & (events.gone < events.ticks)).tolist():
        left.setdefault(int(events.nbytes[number]), []).append(number)
    pairs = []
    for number in np.flatnonzero((events.born >= 0) & (events.gone >= events.ticks)).tolist():
        found = left.get(int(events.nbytes[number]))
        if found:
            same = next((one for one in found if events.category[one] == events.category[number]), found[0])
            found.remove(same)
            pairs.append((number, same))
    return pairs


@lru_cache(maxsize=8)
def list_step_events(events: MemoryEvents, *, first: bool) -> list[tuple[int, int, bool]]:
    """What comes and goes in a step, in the host's order: tick, block, whether it comes."""
    born = np.where((events.born < 0) & first, events.appears, events.born)
    comes, goes = np.flatnonzero(born >= 0), np.flatnonzero(events.gone < events.ticks)
    ticks = np.concatenate((born[comes], events.gone[goes]))
    number = np.concatenate((comes, goes))
    order = np.argsort(ticks, kind="stable")
    kinds = order < len(comes)
    return list(zip(ticks[order].tolist(), number[order].tolist(), kinds.tolist(), strict=True))


KNOWN_SPREAD = 0.02
"""Log-sigma of the allocated bytes of a captured step, whose tensors are known, and of one under a vendor's modules,
whose programs hardly change. Set by hand; SimuMax differs by 0.7 %."""
PYTORCH_SPREAD = 0.12
"""That of a described step of PyTorch's own ops: what a framework keeps for its backward pass differs between releases
(torchtitan's rows of one model by 30 %). Set by hand with torchtitan's and torchtune's rows in view."""
RESERVED_SPREAD = 0.03
"""Log-sigma of reserved bytes beyond that of allocated ones: the order of frees across streams."""
FRAGMENTATION_SPREAD = 0.35
"""Share by which what lies free between blocks differs from run to run and release to release. Set by hand with
TorchRec's rows in view, of which repeats of one configuration differ by 3 to 5 % with 27 % fragmentation."""
WOULD_NOT_RUN = "it would not run as it is"
"""How a note ends that a step does not fit."""
_USUAL_FRAGMENTATION = 0.03  # of what is allocated
_WORST_FRAGMENTATION = 1.0
_CLEAR = 0.999  # a probability from which no replay is worth its time
_LARGEST = 8


@dataclass(frozen=True, slots=True)
class LargestBlock:
    """Blocks of one kind and place at the peak: bytes together, and how many."""

    category: str
    module: str
    nbytes: int
    count: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data, GB."""
        return {"category": self.category, "module": self.module, "gb": self.nbytes / 1e9, "count": self.count}


@dataclass(frozen=True, eq=False)
class DeviceMemory(Memory):
    """Memory of the fullest rank on its device, in bytes. `spread` is the log-sigma of what is allocated."""

    device: Device
    process: ProcessMemory
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    spread: float = KNOWN_SPREAD

    __hash__ = None

    @cached_property
    def replay(self) -> Replay:
        """Steps through the caching allocator of a device without limit."""
        return replay_steps(self.events, self.settings)

    @property
    def allocated_bytes(self) -> int:
        """The most that PyTorch reports as allocated: blocks of which less than a MiB is left over are not split."""
        return self.replay.allocated

    @property
    def active_bytes(self) -> int:
        """The most that is allocated, or freed and still in use by another stream."""
        return self.replay.active

    @property
    def reserved_bytes(self) -> int:
        """The most that the allocator holds of the device."""
        return self.replay.reserved

    @property
    def used_bytes(self) -> float:
        """What nvidia-smi shows of the process: reserved, the context, communicators."""
        return self.reserved_bytes + self.process.total

    @property
    def host_bytes(self) -> int:
        """The most that tensors of the step take of host memory: batches, offloaded states and activations, tables."""
        return self.events.host_bytes

    @property
    def host_interval(self) -> tuple[float, float]:
        """90 % interval of `host_bytes`; up to what pinned memory takes, whose blocks are powers of two."""
        return _spread_out(self.host_bytes, self.spread)[0], _spread_out(self.events.pinned_bytes, self.spread)[1]

    @property
    def limit_bytes(self) -> float:
        """Bytes of the device."""
        return self.device.memory_bytes

    @property
    def required_bytes(self) -> float:
        """The least a device must have: under pressure the allocator gives back every segment that is free, so that it
        holds at most those that are not."""
        return self.replay.held + self.process.total

    @property
    def needed_bytes(self) -> float:
        """What the step takes of the device: `used_bytes`, or the least that it needs where it fits with that alone."""
        return self.required_bytes if self.used_bytes > self.limit_bytes and self.fits else self.used_bytes

    @cached_property
    def fit_probability(self) -> float:
        """How sure it is that the step fits."""
        return self.weigh_fit(0.0)

    def weigh_fit(self, others: float) -> float:
        """How sure it is that the step fits beside so many `others`' bytes."""
        room = self.limit_bytes - others
        if not math.isfinite(room) or room <= 0:
            return float(room > 0)
        usual = math.hypot(self.spread, RESERVED_SPREAD)
        worst = self.peak_bytes * (1 + _WORST_FRAGMENTATION) + self.process.total
        if self._compute_probability(worst, usual, room) > _CLEAR:
            return self._compute_probability(self.estimate_used_bytes(), usual, room)
        surely = self._compute_probability(self.used_bytes, self._reserved_spread, room)
        if surely > _CLEAR or self._compute_probability(self.peak_bytes + self.process.total, usual, room) < 1 - _CLEAR:
            return surely
        return self._compute_probability(self.required_bytes, self._reserved_spread, room)

    @property
    def fits(self) -> bool:
        """Whether it is more likely than not that the step fits."""
        return self.fit_probability >= 0.5

    def describe_excess(self, what: str, where: str = "") -> str:
        """By how much a step (`what`) that does not fit on the ranks `where` is too large."""
        needed, limit = self.required_bytes, self.limit_bytes
        return (
            f"{what} needs {needed / 1e9:,.1f} GB {f'on {where} ' if where else ''}but {self.device.key} has "
            f"{limit / 1e9:.0f} GB: {max(needed - limit, 0.0) / 1e9:,.1f} GB too much; {WOULD_NOT_RUN}"
        )

    def estimate_used_bytes(self) -> float:
        """About `used_bytes`, without a replay: for searches over many steps."""
        return self.peak_bytes * (1 + _USUAL_FRAGMENTATION) + self.process.total

    @property
    def allocated_interval(self) -> tuple[float, float]:
        """90 % interval of `allocated_bytes`."""
        return _spread_out(self.allocated_bytes, self.spread)

    @property
    def reserved_interval(self) -> tuple[float, float]:
        """90 % interval of `reserved_bytes`; never below what is surely allocated."""
        low, high = _spread_out(self.reserved_bytes, self._reserved_spread)
        return max(low, self.allocated_interval[0]), high

    @property
    def used_interval(self) -> tuple[float, float]:
        """90 % interval of `used_bytes`."""
        return _spread_out(self.used_bytes, self._compute_spread(self.used_bytes, self._reserved_spread))

    def list_largest(self, most: int = _LARGEST) -> list[LargestBlock]:
        """What takes most at the peak: blocks of one category and module together."""
        events = self.events
        alive = np.flatnonzero(events.mark_alive(events.peak_tick))
        names = [group_layers(label) for label in events.labels]
        places = {name: number for number, name in enumerate(dict.fromkeys(names))}
        of_label = np.array([places[name] for name in names], dtype=np.int64)
        modules = list(places)
        keys = events.category[alive] * len(modules) + of_label[events.label[alive]]
        found, place = np.unique(keys, return_inverse=True)
        sums, counts = np.zeros(len(found), dtype=np.int64), np.bincount(place, minlength=len(found))
        np.add.at(sums, place, events.blocks[alive])
        return [
            LargestBlock(
                CATEGORIES[int(found[i]) // len(modules)], modules[int(found[i]) % len(modules)], int(sums[i]),
                int(counts[i]),
            )
            for i in np.argsort(-sums, kind="stable")[:most].tolist()
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units (GB: 1e9 bytes)."""
        limit = self.limit_bytes
        return {
            "allocated_gb": self.allocated_bytes / 1e9,
            "tensors_gb": self.peak_bytes / 1e9,
            "allocated_interval_gb": [bound / 1e9 for bound in self.allocated_interval],
            "active_gb": self.active_bytes / 1e9,
            "reserved_gb": self.reserved_bytes / 1e9,
            "reserved_interval_gb": [bound / 1e9 for bound in self.reserved_interval],
            "used_gb": self.used_bytes / 1e9,
            "used_interval_gb": [bound / 1e9 for bound in self.used_interval],
            "host_gb": self.host_bytes / 1e9,
            "host_interval_gb": [bound / 1e9 for bound in self.host_interval],
            "limit_gb": limit / 1e9 if math.isfinite(limit) else None,
            "fits": self.fits,
            "fit_probability": self.fit_probability,
            "fragmentation_gb": (self.reserved_bytes - self.active_bytes) / 1e9,
            **self.process.to_dict(),
            "by_category_gb": {name: nbytes / 1e9 for name, nbytes in self.by_kind.items()},
            "largest": [one.to_dict() for one in self.list_largest()],
        }

    @cached_property
    def _reserved_spread(self) -> float:
        """Log-sigma of reserved bytes: of tensors, of what is free between them, and of one segment more or less."""
        reserved = max(self.reserved_bytes, 1)
        free = FRAGMENTATION_SPREAD * (reserved - self.active_bytes)
        return math.hypot(self.spread, RESERVED_SPREAD, free / reserved, 0.5 * min(LARGE_SEGMENT / reserved, 1.0))

    def _compute_spread(self, needed: float, spread: float) -> float:
        """Log-sigma of a number of bytes that includes the process; `spread` is that of the allocator's."""
        allocator = spread * max(needed - self.process.total, 0.0)
        return math.hypot(allocator, CONTEXT_SPREAD * self.process.total) / max(needed, 1.0)

    def _compute_probability(self, needed: float, spread: float, room: float) -> float:
        """That so many bytes are no more than there is room for."""
        sigma = self._compute_spread(needed, spread)
        return 0.5 * math.erfc(-math.log(room / max(needed, 1.0)) / sigma / math.sqrt(2))


def compute_headroom(device: Device, communicators: Communicators) -> float:
    """Share of a device that tensors may not take if a step is to fit: the process, and what usually lies free between
    blocks. The rule of `fits`, for searches over plans that are not replayed."""
    room = device.memory_bytes - estimate_process_memory(device, communicators).total
    return 1.0 - max(room, 0.0) / (1.0 + _USUAL_FRAGMENTATION) / device.memory_bytes


def _spread_out(nbytes: float, sigma: float) -> tuple[float, float]:
    return nbytes * math.exp(-Z90 * sigma), nbytes * math.exp(Z90 * sigma)


_NONE = Communicators()


def make_device_memory(
    memory: Memory, device: Device, *, communicators: Communicators = _NONE, settings: AllocatorSettings | None = None,
    spread: float = KNOWN_SPREAD, framework: str = DEFAULT_FRAMEWORK,
) -> DeviceMemory:  # fmt: skip
    """The memory of a step on a device, with what libraries of this release of PyTorch and the process take."""
    events: MemoryEvents = add_workspaces(memory.events, device, framework)
    process = ProcessMemory(0.0, 0.0)
    if not device.is_cpu:
        process = estimate_process_memory(device, communicators, framework)
    return DeviceMemory(events, device, process, settings or AllocatorSettings(), spread=spread)

"""When blocks of device memory come and go in a training step: what an allocator is asked for, in the host's order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from traincast.ir.ops import Phase, Signature, StorageKind
from traincast.ir.program import USES, Program
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast.utils.errors import TraincastError

CATEGORIES = (*USES, "temporary", "workspace")
"""What blocks are for: the uses of a program's storages, results that no later pass reads, what libraries work in."""
TEMPORARY = CATEGORIES.index("temporary")
UNTOUCHED = "what no op touches"
"""Label of what is there all the same: another model, data that wait, the step before."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
BLOCK = 512
"""Bytes that PyTorch's allocators round up to."""
_MOST_BYTES = 2.0**62
_COUNT_FROM_USE = (StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)


def group_layers(module: str) -> str:
    """A module's name with numbers left out, so that layers are together.

    >>> group_layers("net.layers.12.mlp")
    'net.layers.*.mlp'
    """
    return _NUMBER.sub(".*", module)


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryEvents:
    """Blocks of one rank's step, by tick of the host: `nbytes` of each, the tick at which it is `born` (-1: before the
    step), and that at which it is `gone` (`ticks`: it outlives the step). One that is there before the step `appears`
    in the first step at that tick (-1: before it). `category` is an index into `CATEGORIES`, `label` into `labels` (the
    module it belongs to), `stream` that on which it is allocated. `host` are the blocks in host memory (None: none).
    `late` has the tick from which a block can be given out again that waits for another stream, by its number."""

    nbytes: IntArray
    born: IntArray
    gone: IntArray
    appears: IntArray
    category: IntArray
    label: IntArray
    stream: IntArray
    labels: tuple[str, ...]
    ticks: int
    host: MemoryEvents | None = None
    late: Mapping[int, int] = field(default_factory=dict)

    @property
    def host_bytes(self) -> int:
        """The most that is kept in host memory at once."""
        return 0 if self.host is None else int(self.host.count_live_bytes(self.host.nbytes).max())

    @property
    def pinned_bytes(self) -> int:
        """That with every block rounded up to a power of two, as PyTorch's cache of pinned memory does."""
        if self.host is None:
            return 0
        exponents = np.ceil(np.log2(np.maximum(self.host.nbytes, 1)))
        return int(self.host.count_live_bytes(2 ** exponents.astype(np.int64)).max())

    @cached_property
    def blocks(self) -> IntArray:
        """Bytes of every block, rounded up as the allocator does."""
        return (self.nbytes + BLOCK - 1) // BLOCK * BLOCK

    @cached_property
    def live_bytes(self) -> IntArray:
        """Bytes alive before the step (entry 0) and after every tick (entry t + 1)."""
        return self.count_live_bytes(self.blocks)

    def count_live_bytes(self, sizes: IntArray) -> IntArray:
        """That for blocks of other sizes."""
        if sizes.sum(dtype=np.float64) > _MOST_BYTES:
            raise TraincastError("the storages of this step exceed 64 bits of bytes; give a smaller batch or model")
        change = np.zeros(self.ticks + 2, dtype=np.int64)
        np.add.at(change, self.born + 1, sizes)
        np.subtract.at(change, self.gone + 1, sizes)
        return np.asarray(np.cumsum(change[: self.ticks + 1]))

    @cached_property
    def peak_tick(self) -> int:
        """The tick after which most bytes are alive (-1: before the step)."""
        return int(np.argmax(self.live_bytes)) - 1

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return int(self.live_bytes[self.peak_tick + 1])

    def mark_alive(self, tick: int) -> BoolArray:
        """Which blocks are alive after a tick."""
        return np.asarray((self.born <= tick) & (self.gone > tick))

    def sum_by_category(self, tick: int) -> dict[str, int]:
        """Bytes alive after a tick by category."""
        alive = self.mark_alive(tick)
        sums = np.zeros(len(CATEGORIES), dtype=np.int64)
        np.add.at(sums, self.category[alive], self.blocks[alive])
        return {name: total for name, total in zip(CATEGORIES, sums.tolist(), strict=True) if total}

    def sum_by_label(self, tick: int) -> dict[str, int]:
        """Bytes alive after a tick by label, most first."""
        alive = self.mark_alive(tick)
        sums = np.zeros(len(self.labels), dtype=np.int64)
        np.add.at(sums, self.label[alive], self.blocks[alive])
        return {self.labels[i]: int(sums[i]) for i in np.argsort(-sums, kind="stable").tolist() if sums[i]}

    def add_blocks(self, nbytes: IntArray, *, labels: tuple[str, ...] | None = None, **columns: Any) -> MemoryEvents:
        """The step with blocks that libraries work in; `columns` (`born`, `gone`, ...) have a value for each or all."""
        given = {"appears": -1, "category": CATEGORIES.index("workspace"), "stream": 0, **columns}
        joined: dict[str, Any] = {
            name: np.concatenate((getattr(self, name), np.broadcast_to(np.asarray(values, np.int64), nbytes.shape)))
            for name, values in {"nbytes": nbytes, **given}.items()
        }
        return replace(self, labels=labels or self.labels, **joined)

    def select_blocks(self, chosen: BoolArray) -> MemoryEvents:
        """The step with some of its blocks."""
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        number = np.cumsum(chosen) - 1
        late = {int(number[block]): tick for block, tick in self.late.items() if chosen[block]}
        return replace(self, late=late, **columns)

    def move_to_host(self, chosen: BoolArray) -> MemoryEvents:
        """The step with some of its blocks in host memory."""
        there, host = replace(self.select_blocks(chosen), host=None), self.host
        if host is not None:
            joined: dict[str, Any] = {
                name: np.concatenate((getattr(host, name), getattr(there, name))) for name in _COLUMNS
            }
            joined["label"][: len(host.nbytes)] += len(there.labels)
            there = replace(there, labels=(*there.labels, *host.labels), **joined)
        return replace(self.select_blocks(~chosen), host=there)

    def scale_activations(self, change: int) -> MemoryEvents:
        """The step with results of ops that take so many bytes more at the peak (or fewer: below 0)."""
        made = (self.category == StorageKind.ACTIVATION) | (self.category == TEMPORARY)
        held = int(self.blocks[made & self.mark_alive(self.peak_tick)].sum())
        factor = max(0.0, 1.0 + change / held) if held else 1.0
        scaled = np.where(made, (self.nbytes * factor).astype(np.int64), self.nbytes)
        return replace(self, nbytes=np.maximum(scaled, 1))

    def sample_categories(self, points: int) -> tuple[IntArray, IntArray]:
        """Ticks (about `points` of them, the peak among them) and the bytes alive after each by category,
        [categories, ticks]."""
        even = np.linspace(-1, self.ticks - 1, points).astype(np.int64)
        ticks = np.unique(np.append(even, self.peak_tick))
        sums = np.zeros((len(CATEGORIES), len(ticks)), dtype=np.int64)
        for sign, moments in ((1, self.born), (-1, self.gone)):
            place = np.searchsorted(ticks, moments)
            seen = place < len(ticks)
            np.add.at(sums, (self.category[seen], place[seen]), sign * self.blocks[seen])
        return ticks, np.asarray(np.cumsum(sums, axis=1))


_COLUMNS = ("nbytes", "born", "gone", "appears", "category", "label", "stream")


@dataclass(slots=True)
class EventWriter:
    """Puts blocks together by hand; `tick` is now."""

    tick: int = 0
    _labels: dict[str, int] = field(default_factory=dict)
    _rows: list[IntArray] = field(default_factory=list)

    def add_blocks(
        self, nbytes: FloatArray | IntArray | float, born: IntArray | int, gone: IntArray | int | None,
        category: IntArray | int, label: str, *, stream: int = 0, appears: int = -1,
    ) -> None:  # fmt: skip
        """Blocks of these sizes; `gone` None: they outlive the step."""
        sizes = np.atleast_1d(np.asarray(nbytes)).astype(np.int64)
        number = self._labels.setdefault(label, len(self._labels))
        rows = np.empty((7, len(sizes)), dtype=np.int64)
        columns = (sizes, born, _MOST_TICKS if gone is None else gone, appears, category, number, stream)
        for row, values in zip(rows, columns, strict=True):
            row[:] = values
        self._rows.append(rows[:, sizes > 0])

    def build_events(self) -> MemoryEvents:
        """All blocks so far."""
        rows = np.concatenate(self._rows, axis=1) if self._rows else np.zeros((7, 0), dtype=np.int64)
        nbytes, born, gone, appears, category, label, stream = rows
        return MemoryEvents(
            nbytes=nbytes, born=born, gone=np.minimum(gone, self.tick), appears=appears, category=category,
            label=label, stream=stream, labels=tuple(self._labels), ticks=self.tick,
        )  # fmt: skip


_MOST_TICKS = 1 << 62


def list_device_storages(program: Program) -> IntArray:
    """The storages of a program that are blocks of device memory, in the order of `list_memory_events`."""
    return np.flatnonzero(~program.storages.on_host & (program.storage_nbytes > 0))


def list_memory_events(program: Program) -> MemoryEvents:
    """The device blocks of a program: op i allocates at tick 2 i and frees at tick 2 i + 1. Optimizer state and
    gradients that are there before the step appear in the first step where they are first used."""
    mine = list_device_storages(program)
    first, module = _find_uses(program)
    _name_owners(program, module)
    late = np.isin(program.columns.storage_kind, _COUNT_FROM_USE) & (first < program.num_ops)
    late &= program.columns.storage_alloc < 0
    label = np.where(first < program.num_ops, module, len(program.names))
    events = _make_events(
        program, mine, program.storage_nbytes, appears=np.where(late, 2 * first, -1)[mine], label=label[mine],
        stream=_find_streams(program)[mine], labels=(*program.names, UNTOUCHED),
        host=_list_host_blocks(program),
    )  # fmt: skip
    return add_op_blocks(events, program, [count_temporary_bytes(one) for one in program.signatures])


def _make_events(program: Program, mine: IntArray, nbytes: IntArray, **columns: Any) -> MemoryEvents:
    """Some storages of a program as blocks."""
    c, ops = program.columns, program.num_ops
    alloc, free = c.storage_alloc[mine].astype(np.int64), c.storage_free[mine].astype(np.int64)
    return MemoryEvents(
        nbytes=nbytes[mine], born=np.where(alloc < 0, -1, 2 * alloc), category=_find_categories(program)[mine],
        gone=np.where(free >= ops, 2 * ops, 2 * free + 1), ticks=2 * ops, **columns,
    )  # fmt: skip


def _find_categories(program: Program) -> IntArray:
    """What every storage is for; results that the backward pass does not find, and those it makes, are temporary."""
    c, use = program.columns, program.storages.use
    early = program.op_phase < Phase.BACKWARD
    if early.all():  # nothing is kept for another pass
        return use
    kept = early[np.maximum(c.storage_alloc, 0)] & ~np.append(early, False)[c.storage_free]
    made = (use == StorageKind.ACTIVATION) & (c.storage_alloc >= 0)
    return np.where(made & ~kept, TEMPORARY, use)


def _name_owners(program: Program, module: IntArray) -> None:
    """Gives state of the optimizer the module of its parameter, at whose place in lists of tensors it is."""
    c, names = program.columns, np.array([bool(name) for name in program.names], dtype=np.bool_)
    if not program.num_ops or not (c.storage_kind == StorageKind.OPTIMIZER_STATE).any():
        return
    left = (c.storage_kind == StorageKind.OPTIMIZER_STATE) & ~names[module]
    op = np.repeat(np.arange(program.num_ops), np.diff(c.input_ptr))
    given = np.flatnonzero(program.op_phase[op] == Phase.OPTIMIZER)
    op, storage, position = op[given], c.tensor_storage[c.input_tensor[given]], given - c.input_ptr[op[given]]
    most = int(np.diff(c.input_ptr).max())
    table = np.full((len(program.symbolic), most), -1, dtype=np.int64)
    for number in np.unique(c.op_signature[op]).tolist():
        places = _list_places(program.symbolic[number])
        table[number, : len(places)] = places
    place = table[c.op_signature[op], position]
    group = op * most + place
    owns = np.isin(c.storage_kind, (StorageKind.PARAMETER, StorageKind.GRADIENT)) & names[module]
    owners = np.flatnonzero((place >= 0) & owns[storage])
    owned, first = np.unique(group[owners], return_index=True)  # the first owner at every place of every op
    states = np.flatnonzero((place >= 0) & left[storage] & np.isin(group, owned))
    state, use = np.unique(storage[states], return_index=True)  # where every state is first used beside an owner
    module[state] = module[storage[owners[first[np.searchsorted(owned, group[states[use]])]]]]


def _list_places(signature: Signature) -> list[int]:
    """The place of every input in its list of tensors; -1 in lists that are shorter than the longest."""
    counts = [count for _, count in signature.groups]
    longest = max(counts, default=0)
    return [place if count == longest else -1 for count in counts for place in range(count)]


def _list_host_blocks(program: Program) -> MemoryEvents | None:
    """What a step keeps in host memory: programs have no bytes of such storages, the ops that touch them do."""
    on_host, c, ops = program.storages.on_host, program.columns, program.num_ops
    if not on_host.any():
        return None
    sizes = np.zeros(len(on_host), dtype=np.int64)
    for pointer, tensor, side in ((c.input_ptr, c.input_tensor, "inputs"), (c.output_ptr, c.output_tensor, "outputs")):
        touched = on_host[c.tensor_storage[tensor]]
        op = np.repeat(np.arange(ops), np.diff(pointer))[touched]
        place = np.flatnonzero(touched) - pointer[op]
        specs = zip(c.op_signature[op].tolist(), place.tolist(), strict=True)
        nbytes = [getattr(program.signatures[number], side)[at].nbytes for number, at in specs]
        np.maximum.at(sizes, c.tensor_storage[tensor][touched], np.array(nbytes, dtype=np.int64))
    mine = np.flatnonzero(on_host & (sizes > 0))
    zeros = np.zeros(len(mine), dtype=np.int64)
    same = {"appears": zeros - 1, "label": zeros, "stream": zeros}
    return _make_events(program, mine, sizes, labels=("",), **same)


def add_op_blocks(
    events: MemoryEvents, program: Program, nbytes: Sequence[float], category: int = TEMPORARY
) -> MemoryEvents:  # fmt: skip
    """The blocks with what ops allocate and free inside themselves: so many bytes by signature."""
    sizes, c = np.array(nbytes, dtype=np.int64), program.columns
    op = np.flatnonzero(sizes[c.op_signature] if sizes.any() else sizes[:0])
    if not len(op):
        return events
    return events.add_blocks(
        sizes[c.op_signature[op]], born=2 * op, gone=2 * op + 1, label=c.op_module[op], stream=c.op_stream[op],
        category=category,
    )  # fmt: skip


def count_temporary_bytes(signature: Signature) -> int:
    """Bytes that an op allocates besides its results. FBGEMM sorts the rows that a backward pass updates: per lookup,
    linear indices and their places (12 bytes), both sorted (12), runs with lengths and sums (20), and for weighted
    lookups the weights sorted with the space of that sort (12)."""
    if "split_embedding_backward" not in signature.name:
        return 0
    flat = [name for name, count in signature.groups for _ in range(count)]
    specs = dict(zip(flat, signature.inputs, strict=False))
    lookups = specs["indices"].numel if "indices" in specs else 0
    weighted = "indice_weights" in specs or "_weighted" in signature.name
    return lookups * (_SORTED_BYTES + (_WEIGHTED_BYTES if weighted and "unweighted" not in signature.name else 0))


_SORTED_BYTES, _WEIGHTED_BYTES = 44, 12


def _find_streams(program: Program) -> IntArray:
    """The stream on which every storage is allocated: that of the op that makes it, but for collectives, whose results
    are allocated on the stream that calls them."""
    c = program.columns
    if not c.op_stream.any():
        return np.zeros(len(c.storage_alloc), dtype=np.int64)
    exchanges = np.array([signature.name.startswith("c10d::") for signature in program.symbolic], dtype=np.bool_)
    calling = np.where(exchanges[c.op_signature], 0, c.op_stream)
    return np.where(c.storage_alloc >= 0, calling[np.maximum(c.storage_alloc, 0)], 0).astype(np.int64)


def _find_uses(program: Program) -> tuple[IntArray, IntArray]:
    """Of every storage: the first op that touches it (the number of ops: none), and the module of that one."""
    c, ops = program.columns, program.num_ops
    first = np.full(len(c.storage_bytes), ops, dtype=np.int64)
    for pointer, tensor in ((c.input_ptr, c.input_tensor), (c.output_ptr, c.output_tensor)):
        np.minimum.at(first, c.tensor_storage[tensor], np.repeat(np.arange(ops), np.diff(pointer)))
    module = np.zeros(len(first), dtype=np.int64)
    module[first < ops] = c.op_module[first[first < ops]]
    return first, module


@dataclass(frozen=True, eq=False)
class Memory:
    """Device memory of one rank's step as the allocator counts it, in bytes."""

    events: MemoryEvents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and (self.peak_bytes, self.by_kind) == (other.peak_bytes, other.by_kind)

    __hash__ = None  # type: ignore[assignment]

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at once."""
        return self.events.peak_bytes

    @cached_property
    def by_kind(self) -> dict[str, int]:
        """What is alive at the peak, by what it is for."""
        return self.events.sum_by_category(self.events.peak_tick)

    @cached_property
    def by_module(self) -> dict[str, int]:
        """What is alive at the peak, by the module that makes or first uses it, most first."""
        return self.events.sum_by_label(self.events.peak_tick)


def compute_peak_memory(program: Program) -> Memory:
    """Device memory of a program."""
    return Memory(list_memory_events(program))

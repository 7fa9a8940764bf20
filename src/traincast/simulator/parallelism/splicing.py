"""A long program from short ones: segments of their columns, copied as arrays in the order in which a rank runs them.

A layer is written once, whatever the number of layers and micro-batches; its columns are then copied with new numbers
for ops, tensors and storages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from traincast.ir.ops import Signature, StorageKind, TensorSpec
from traincast.ir.program import Columns, Program
from traincast.ir.sizes import SizeTable, replace_sizes_by_indices
from traincast.utils.arrays import BoolArray, Int32Array

_LASTING = (StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE, StorageKind.BUFFER)


@dataclass(frozen=True, eq=False)
class Source:
    """A short program prepared for copying: signatures, sizes and names under the numbers of the long one."""

    program: Program
    signature: Int32Array
    names: tuple[str, ...]
    scope_name: Int32Array
    storage_bytes: Int32Array
    lasting: BoolArray  # storages that all copies of one unit share


@dataclass(slots=True)
class Unit:
    """One copy of a source's tensors: a layer of the model, for one micro-batch."""

    source: Source
    tensors: int
    storage: Int32Array  # number of each of the source's storages in the long program
    begins: list[tuple[int, int, int]] = field(default_factory=list)  # (first op, end) of a segment, and where it went


class Tables:
    """What programs that are written together share: signatures, sizes and names, each numbered once."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.names: dict[str, int] = {}
        self.signatures: dict[Signature, int] = {}
        self._forms: dict[TensorSpec, TensorSpec] = {}
        self.sources: dict[int, Source] = {}
        self._modules: dict[tuple[int, str], Int32Array] = {}
        self._segments: dict[tuple[int, bytes], _Segment] = {}

    def source(self, program: Program) -> Source:
        """A short program under the shared numbers."""
        if id(program) not in self.sources:
            c = program.columns
            numbers = [
                self.signatures.setdefault(
                    replace_sizes_by_indices(plain, self._size, self._forms), len(self.signatures)
                )
                for plain in program.signatures
            ]
            sizes = np.array([self._size(value) for value in program.size_values.tolist()], dtype=np.int32)
            lasting = np.isin(c.storage_kind, _LASTING) & (c.storage_alloc < 0)
            # what comes from a neighbour takes no memory of its own
            borrowed = (c.storage_alloc < 0) & (c.storage_kind == StorageKind.ACTIVATION)
            nbytes = np.where(borrowed, self._size(0), sizes[c.storage_bytes]).astype(np.int32)
            scope = np.array([self._name(name) for name in program.names], dtype=np.int32)
            self.sources[id(program)] = Source(
                program, np.array(numbers, dtype=np.int32), program.names, scope, nbytes, lasting
            )
        return self.sources[id(program)]

    def modules_of(self, segment: _Segment, source: Source, module: str) -> Int32Array:
        """The numbers of the modules of a segment's ops under a path."""
        key = (id(segment), module)
        if key not in self._modules:
            paths = [f"{module}.{name}" if name and module else name or module for name in source.names]
            used, place = np.unique(segment.module, return_inverse=True)
            numbers = np.array([self._name(paths[n]) for n in used.tolist()], dtype=np.int32)
            self._modules[key] = numbers[place]
        return self._modules[key]

    def segment(self, source: Source, ops: BoolArray) -> _Segment:
        """The columns of some ops of a source."""
        key = (id(source), ops.tobytes())
        if key not in self._segments:
            self._segments[key] = _cut_segment(source, ops)
        return self._segments[key]

    def _size(self, value: int) -> int:
        return self.sizes.setdefault(value, len(self.sizes))

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))


class ProgramWriter:
    """Puts segments together. `columns` are those of the program written so far; `programs_of` makes programs of the
    columns of several writers."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._ops = self._tensors = self._storages = 0
        self._placed: list[tuple[_Segment, Unit, str]] = []
        self._lasting: dict[str, Int32Array] = {}
        self._units: list[Unit] = []
        self._new_storages: list[tuple[Source, BoolArray]] = []

    def unit(self, program: Program, owner: str) -> Unit:
        """New tensors for a copy of `program`; copies with one `owner` share their weights."""
        source = self.tables.source(program)
        c = program.columns
        storage = np.full(len(c.storage_kind), -1, dtype=np.int32)
        fresh = ~source.lasting
        if owner not in self._lasting:
            fresh = np.ones_like(source.lasting)
        storage[fresh] = self._storages + np.arange(int(fresh.sum()), dtype=np.int32)
        self._storages += int(fresh.sum())
        self._new_storages.append((source, fresh))
        if owner in self._lasting:
            storage[source.lasting] = self._lasting[owner]
        else:
            self._lasting[owner] = storage[source.lasting]
        unit = Unit(source, self._tensors, storage)
        self._tensors += len(c.tensor_storage)
        self._units.append(unit)
        return unit

    def write(self, unit: Unit, ops: BoolArray, module: str) -> None:
        """Copies the marked ops of a unit's source, in their scopes, under the path `module`."""
        segment = self.tables.segment(unit.source, ops)
        if segment.scopes:
            self._placed.append((segment, unit, module))
            unit.begins.append((segment.first, segment.end, self._ops))
            self._ops += len(segment.signature)

    def columns(self) -> Columns:
        """The columns of the program written so far: those of all segments one after the other, with new numbers."""
        segments = [segment for segment, _, _ in self._placed]
        ops = np.array([len(segment.signature) for segment in segments], dtype=np.int64)
        inputs = np.array([len(segment.inputs) for segment in segments], dtype=np.int64)
        outputs = np.array([len(segment.outputs) for segment in segments], dtype=np.int64)
        scopes = np.array([segment.scopes for segment in segments], dtype=np.int64)
        tensors = np.array([unit.tensors for _, unit, _ in self._placed], dtype=np.int64)
        alloc, free = self._lifetimes()
        modules = [self.tables.modules_of(segment, unit.source, module) for segment, unit, module in self._placed]
        threads = _join([segment.scope_thread for segment in segments])
        return Columns(
            op_signature=_join([segment.signature for segment in segments]),
            op_module=_join(modules),
            op_stream=_join([segment.stream for segment in segments]),
            op_forward=np.full(self._ops, -1, dtype=np.int32),
            input_tensor=_join_shifted([segment.inputs for segment in segments], tensors, inputs),
            input_ptr=_join_pointers([segment.input_ends for segment in segments], inputs, ops),
            output_tensor=_join_shifted([segment.outputs for segment in segments], tensors, outputs),
            output_ptr=_join_pointers([segment.output_ends for segment in segments], outputs, ops),
            scope_name=_join([segment.scope_name for segment in segments]),
            scope_phase=_join([segment.scope_phase for segment in segments]),
            scope_thread=threads,
            scope_after=_find_handovers(threads),
            scope_ptr=_join_pointers([segment.scope_ends for segment in segments], ops, scopes),
            tensor_storage=_join([unit.storage[unit.source.program.columns.tensor_storage] for unit in self._units]),
            storage_bytes=_join([source.storage_bytes[fresh] for source, fresh in self._new_storages]),
            storage_kind=_join([source.program.columns.storage_kind[fresh] for source, fresh in self._new_storages]),
            storage_alloc=alloc,
            storage_free=free,
        )

    def _lifetimes(self) -> tuple[Int32Array, Int32Array]:
        """When storages come and go: as in their sources, at the ops that copies of their segments became."""
        alloc = np.full(self._storages, -1, dtype=np.int32)
        free = np.full(self._storages, self._ops, dtype=np.int32)
        for unit in self._units:
            c, mine = unit.source.program.columns, ~unit.source.lasting
            if not unit.begins or not mine.any():
                continue
            last = max(begin + end - first for first, end, begin in unit.begins)
            where = np.full(len(c.op_signature) + 1, -1, dtype=np.int64)
            for first, end, begin in unit.begins:
                where[first:end] = begin + np.arange(end - first)
            born, gone = c.storage_alloc[mine], c.storage_free[mine]
            at = np.where(born >= 0, where[born], where.max(initial=0))
            until = np.where(gone < len(c.op_signature), where[np.minimum(gone, len(where) - 1)], last - 1)
            numbers = unit.storage[mine]
            alloc[numbers] = np.where(at >= 0, at, last - 1)
            free[numbers] = np.maximum(np.where(until >= 0, until, last - 1), alloc[numbers])
        return alloc, free


def make_programs(tables: Tables, columns: Sequence[Columns], *, batch_size: int, seq_len: int) -> tuple[Program, ...]:
    """Programs that share signatures, sizes and names."""
    sizes = SizeTable.constant(np.array(list(tables.sizes), dtype=np.int64))
    symbolic, names = tuple(tables.signatures), tuple(tables.names)
    rigid = "it was written for this layout; ask for another batch or sequence length instead"
    return tuple(
        Program(
            sizes=sizes, symbolic=symbolic, names=names, columns=each, batch_size=batch_size, seq_len=seq_len,
            rigid=rigid,
        )
        for each in columns
    )  # fmt: skip


def _join(parts: Sequence[Int32Array]) -> Int32Array:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _join_shifted(parts: Sequence[Int32Array], offsets: np.ndarray, counts: np.ndarray) -> Int32Array:
    """All parts one after the other, the numbers of each higher by its offset."""
    return _join(parts) + np.repeat(offsets, counts).astype(np.int32)


def _join_pointers(ends: Sequence[Int32Array], held: np.ndarray, counts: np.ndarray) -> Int32Array:
    """Pointers of all parts: `ends` of each from its own begin, `held` how many things a part points at."""
    zero = np.zeros(1, dtype=np.int32)
    return np.concatenate((zero, _join_shifted(ends, np.cumsum(held) - held, counts)))


def _find_handovers(threads: Int32Array) -> Int32Array:
    """The scope that each one comes after: the one before, where another thread ran that."""
    after = np.full(len(threads), -1, dtype=np.int32)
    changes = 1 + np.flatnonzero(np.diff(threads))
    after[changes] = changes - 1
    return after


@dataclass(frozen=True, eq=False, slots=True)
class _Segment:
    """The columns of some ops of a source, under the long program's numbers but for where it begins."""

    signature: Int32Array
    module: Int32Array
    stream: Int32Array
    inputs: Int32Array
    input_ends: Int32Array
    outputs: Int32Array
    output_ends: Int32Array
    scope_name: Int32Array
    scope_phase: Int32Array
    scope_thread: Int32Array
    scope_ends: Int32Array
    scopes: int
    first: int
    end: int


def _cut_segment(source: Source, ops: BoolArray) -> _Segment:
    c = source.program.columns
    chosen = np.flatnonzero(ops)
    scope_of = source.program.op_scope
    # a scope without ops (the host's own work) goes with the one after it
    low, high = (int(scope_of[chosen[0]]), int(scope_of[chosen[-1]]) + 1) if len(chosen) else (0, 0)
    low = _include_empty_scopes_before(c.scope_ptr, low)
    scopes = np.arange(low, high)
    counts = np.bincount(scope_of[chosen] - low, minlength=len(scopes)) if len(chosen) else np.zeros(0, dtype=np.int64)
    following = np.where(np.diff(c.scope_ptr)[scopes] > 0, np.arange(len(scopes)), len(scopes))
    following = np.minimum.accumulate(following[::-1])[::-1]
    kept = counts[following] > 0
    inputs, input_ends = _take_tensors(c.input_ptr, c.input_tensor, chosen)
    outputs, output_ends = _take_tensors(c.output_ptr, c.output_tensor, chosen)
    return _Segment(
        signature=source.signature[c.op_signature[chosen]],
        module=c.op_module[chosen],
        stream=c.op_stream[chosen],
        inputs=inputs,
        input_ends=input_ends,
        outputs=outputs,
        output_ends=output_ends,
        scope_name=source.scope_name[c.scope_name[scopes[kept]]],
        scope_phase=c.scope_phase[scopes[kept]],
        scope_thread=c.scope_thread[scopes[kept]],
        scope_ends=np.cumsum(counts[kept]).astype(np.int32),
        scopes=int(kept.sum()),
        first=int(chosen[0]) if len(chosen) else 0,
        end=int(chosen[-1]) + 1 if len(chosen) else 0,
    )


def _include_empty_scopes_before(scope_ptr: Int32Array, scope: int) -> int:
    while scope > 0 and scope_ptr[scope - 1] == scope_ptr[scope]:
        scope -= 1
    return scope


def _take_tensors(pointer: Int32Array, tensor: Int32Array, chosen: np.ndarray) -> tuple[Int32Array, Int32Array]:
    counts = np.diff(pointer)[chosen]
    ends = np.cumsum(counts)
    place = np.repeat(pointer[chosen] - (ends - counts), counts) + np.arange(int(counts.sum()))
    return tensor[place].astype(np.int32), ends.astype(np.int32)


@lru_cache(maxsize=1024)
def mark_ops_between(program: Program, first: int, end: int) -> BoolArray:
    """The ops from `first` to before `end`, marked."""
    marked = np.zeros(program.num_ops, dtype=np.bool_)
    marked[first:end] = True
    return marked

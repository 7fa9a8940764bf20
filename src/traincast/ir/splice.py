"""Putting new scopes and ops between those of a program, with what is there left in its order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from traincast.ir.ops import Phase, Signature, StorageKind
from traincast.ir.program import Columns, Program
from traincast.ir.sizes import SizeTable
from traincast.ir.symbolic import with_size_indices
from traincast.utils.arrays import BoolArray, Int32Array, IntArray

_PER_OP = ("op_signature", "op_module", "op_forward", "op_stream")
_PER_SCOPE = ("scope_name", "scope_phase", "scope_thread", "scope_after")


class Splice:
    """Collects what is new; `build` gives the program. Signatures are given with plain sizes, which stay constant
    when the program is re-batched.

    Scopes, ops, tensors and storages are named by handles: those of the program by their index, new ones by what the
    methods return. New scopes come before an old one, new ops at the end of a scope, both in the order they are
    added. `storage_free` and `scope_after` of what is old may be changed, in handles. `program` is the old one.
    """

    def __init__(self, program: Program) -> None:
        c = program.columns
        self.program = program
        self._never = program.num_ops  # as an index of storage_free: outlives the step
        self._sizes = _constants(program.sizes)
        self._new_sizes: list[int] = []
        self._names = {name: index for index, name in enumerate(program.names)}
        self._signatures = {signature: index for index, signature in enumerate(program.symbolic)}
        self._known: dict[Signature, int] = {}  # plain signatures met so far
        self._new: dict[str, list[int]] = {name: [] for name in Columns.names()}
        self._op_scope: list[int] = []
        self._scope_before: list[int] = []
        self._inputs: list[Sequence[int]] = []
        self._outputs: list[Sequence[int]] = []
        self.storage_free: list[int] = c.storage_free.tolist()
        self.scope_after: list[int] = c.scope_after.tolist()

    @property
    def last_op(self) -> int:
        """The op added last."""
        return self._never + len(self._op_scope)

    @property
    def next_op(self) -> int:
        """The op that will be added next."""
        return self.last_op + 1

    def storage(self, nbytes: int, kind: StorageKind, *, alloc: int = -1) -> int:
        """A new storage of `nbytes` bytes, allocated by op `alloc` (-1: there before the step), never freed unless
        `storage_free` says so."""
        for column, value in (("storage_bytes", self._size(nbytes)), ("storage_kind", kind), ("storage_alloc", alloc)):
            self._new[column].append(int(value))
        self.storage_free.append(self._never)
        return len(self.storage_free) - 1

    def tensor(self, storage: int) -> int:
        """A new tensor on a storage."""
        self._new["tensor_storage"].append(storage)
        return len(self.program.columns.tensor_storage) + len(self._new["tensor_storage"]) - 1

    def scope(self, name: str, phase: Phase, *, before: int, thread: int = 0, after: int = -1) -> int:
        """A new top-level host op before the old scope `before` (their number: at the end)."""
        for column, value in (("scope_name", self._name(name)), ("scope_phase", phase), ("scope_thread", thread)):
            self._new[column].append(int(value))
        self._scope_before.append(before)
        self.scope_after.append(after)
        return len(self.scope_after) - 1

    def op(
        self,
        signature: Signature,
        inputs: Iterable[int],
        outputs: Iterable[int],
        *,
        scope: int,
        module: str = "",
        stream: int = 0,
    ) -> int:
        """A new op at the end of a scope."""
        if signature not in self._known:
            symbolic = with_size_indices(signature, self._size)
            self._known[signature] = self._signatures.setdefault(symbolic, len(self._signatures))
        index = self._known[signature]
        for column, value in (("op_signature", index), ("op_module", self._name(module)), ("op_stream", stream)):
            self._new[column].append(value)
        self._new["op_forward"].append(-1)
        self._op_scope.append(scope)
        self._inputs.append(tuple(inputs))
        self._outputs.append(tuple(outputs))
        return self.last_op

    def build(self) -> Program:
        """The program with everything in place."""
        program, c = self.program, self.program.columns
        scopes = self._scope_order()
        scope_place = _inverse(scopes)
        op_scope = np.concatenate([program.op_scope, np.array(self._op_scope, dtype=np.int32)])
        ops = np.argsort(scope_place[op_scope], kind="stable")
        old, new = np.split(_inverse(ops), [self._never])
        op_place = np.concatenate([old, [len(ops)], new])  # by handle
        joined = {name: np.concatenate([getattr(c, name), self._column(name)]) for name in Columns.names()}
        joined["scope_after"] = np.append(scope_place, -1)[self.scope_after]
        joined["op_forward"] = np.append(op_place, -1)[joined["op_forward"]]
        joined["storage_alloc"] = np.append(op_place, -1)[joined["storage_alloc"]]
        joined["storage_free"] = np.where(self._gone_before_first_op(), 0, op_place[self.storage_free])
        for name in (*_PER_OP, *_PER_SCOPE):
            joined[name] = joined[name][ops if name in _PER_OP else scopes]
        joined["input_ptr"], joined["input_tensor"] = _ragged(c.input_ptr, c.input_tensor, self._inputs, ops)
        joined["output_ptr"], joined["output_tensor"] = _ragged(c.output_ptr, c.output_tensor, self._outputs, ops)
        counts = np.bincount(scope_place[op_scope], minlength=len(scopes))
        joined["scope_ptr"] = np.concatenate([[0], np.cumsum(counts)])
        return replace(
            program,
            sizes=_extended(program.sizes, self._new_sizes),
            symbolic=tuple(self._signatures),
            names=tuple(self._names),
            columns=Columns(**{name: np.asarray(values, dtype=np.int32) for name, values in joined.items()}),
        )

    def _gone_before_first_op(self) -> BoolArray:
        """Storages freed before any op ran, which a program notes as freed after op 0: they stay so."""
        c = self.program.columns
        gone = np.zeros(len(self.storage_free), dtype=np.bool_)
        old = (c.storage_alloc < 0) & (c.storage_free == 0)
        old[storages_of(self.program, 0, 1)] = False
        gone[: len(old)] = old
        return gone

    def _scope_order(self) -> IntArray:
        old = self.program.num_scopes
        before = np.concatenate([np.arange(old), np.array(self._scope_before, dtype=np.int64)])
        return np.lexsort((np.arange(len(before)), np.arange(len(before)) < old, before))

    def _column(self, name: str) -> Int32Array:
        return np.array(self._new[name], dtype=np.int32)

    def _size(self, value: int) -> int:
        if value not in self._sizes:
            self._sizes[value] = len(self.program.sizes) + len(self._new_sizes)
            self._new_sizes.append(value)
        return self._sizes[value]

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


def storages_of(program: Program, first: int, end: int) -> Int32Array:
    """The storages that ops `first` to `end` (excluded) read or write."""
    c = program.columns
    tensors = (
        c.input_tensor[c.input_ptr[first] : c.input_ptr[end]],
        c.output_tensor[c.output_ptr[first] : c.output_ptr[end]],
    )
    storages: Int32Array = c.tensor_storage[np.concatenate(tensors)]
    return storages


def _constants(table: SizeTable) -> dict[int, int]:
    """The sizes of a table that are plain numbers, with their index."""
    plain = ~np.any(table.coefficients[:, 1:], axis=1) & (table.denominator == 1)
    indices = np.flatnonzero(plain)
    return dict(zip(table.coefficients[indices, 0].tolist(), indices.tolist(), strict=True))


def _extended(table: SizeTable, values: list[int]) -> SizeTable:
    more = SizeTable.constant(np.array(values, dtype=np.int64))
    return SizeTable(
        np.concatenate([table.coefficients, more.coefficients]),
        np.concatenate([table.denominator, more.denominator]),
        np.concatenate([table.seq_multiple, more.seq_multiple]),
    )


def _inverse(order: IntArray) -> IntArray:
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


def _ragged(
    pointer: Int32Array, values: Int32Array, more: Sequence[Sequence[int]], order: IntArray
) -> tuple[IntArray, IntArray]:
    """Pointer and entries of old and new rows, in another order of rows."""
    flat = np.concatenate([values, np.array([entry for row in more for entry in row], dtype=np.int64)])
    counts = np.concatenate([np.diff(pointer), np.array([len(row) for row in more], dtype=np.int64)])
    starts = np.concatenate([[0], np.cumsum(counts)])[:-1]
    new_pointer = np.concatenate([[0], np.cumsum(counts[order])])
    shift = np.repeat(starts[order] - new_pointer[:-1], counts[order])
    return new_pointer, flat[np.arange(len(flat)) + shift]

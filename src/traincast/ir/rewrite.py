"""A program as lists that can be changed freely: ops taken out, put in, repeated; then columns again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from traincast.ir.edit import pointer
from traincast.ir.ops import Phase, Signature, StorageKind
from traincast.ir.program import Columns, Program


@dataclass(eq=False, slots=True)
class OpRow:
    """An op; its signature has symbolic sizes, its tensors are numbers."""

    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: int
    stream: int
    forward: OpRow | None = None


@dataclass(eq=False, slots=True)
class ScopeRow:
    """A top-level host op with the ops inside; `after` is the scope of another thread that it waits for."""

    name: str
    phase: Phase
    thread: int
    ops: list[OpRow] = field(default_factory=list)
    after: ScopeRow | None = None


@dataclass(eq=False, slots=True)
class StorageRow:
    """Memory: `size` is an index of the sizes; `alloc` None is there before the step, `free` None outlives it."""

    size: int
    kind: int
    alloc: OpRow | None
    free: OpRow | None
    made: bool
    lasts: bool


class Rewrite:
    """The rows of a program; `build` makes a program of what they are then.

    Storages whose first or last op has gone live from the first to the last op that touches them; those that no op
    touches any more and that a step made are gone.
    """

    def __init__(self, program: Program) -> None:
        c = program.columns
        self.program = program
        ops = [
            OpRow(
                program.symbolic[c.op_signature[i]],
                tuple(c.input_tensor[c.input_ptr[i] : c.input_ptr[i + 1]].tolist()),
                tuple(c.output_tensor[c.output_ptr[i] : c.output_ptr[i + 1]].tolist()),
                int(c.op_module[i]),
                int(c.op_stream[i]),
            )
            for i in range(program.num_ops)
        ]
        for row, forward in zip(ops, c.op_forward.tolist(), strict=True):
            row.forward = ops[forward] if forward >= 0 else None
        self.ops = ops  # as they were, by their old numbers
        self.scopes = [
            ScopeRow(
                program.names[c.scope_name[i]], Phase(int(c.scope_phase[i])), int(c.scope_thread[i]),
                ops[c.scope_ptr[i] : c.scope_ptr[i + 1]],
            )
            for i in range(program.num_scopes)
        ]  # fmt: skip
        for scope, after in zip(self.scopes, c.scope_after.tolist(), strict=True):
            scope.after = self.scopes[after] if after >= 0 else None
        self.tensors: list[int] = c.tensor_storage.tolist()
        columns = (c.storage_bytes, c.storage_kind, c.storage_alloc, c.storage_free)
        self.storages = [
            StorageRow(
                size, kind, ops[alloc] if alloc >= 0 else None, ops[free] if free < len(ops) else None, alloc >= 0,
                free >= len(ops),
            )
            for size, kind, alloc, free in zip(*(column.tolist() for column in columns), strict=True)
        ]  # fmt: skip

    def storage_of(self, tensor: int) -> StorageRow:
        """The memory of a tensor."""
        return self.storages[self.tensors[tensor]]

    def new_tensor(self, size: int, kind: StorageKind, *, made: bool = True) -> int:
        """A tensor on memory of its own, made by the step or there before it."""
        self.storages.append(StorageRow(size, int(kind), None, None, made, not made))
        self.tensors.append(len(self.storages) - 1)
        return len(self.tensors) - 1

    def drop(self, gone: Callable[[OpRow], bool], *, empty: bool = True) -> None:
        """Takes ops out; with `empty`, scopes that hold none any more go too."""
        kept = []
        for scope in self.scopes:
            left = [op for op in scope.ops if not gone(op)]
            emptied = bool(scope.ops) and not left
            scope.ops = left
            if not (empty and emptied):
                kept.append(scope)
        self.keep_scopes(kept)

    def keep_scopes(self, kept: Iterable[ScopeRow]) -> None:
        """Only these scopes; who waited for one that is gone waits for the one before it on that thread."""
        left = list(kept)
        alive = {id(scope) for scope in left}
        stands_for: dict[int, ScopeRow | None] = {}
        last: dict[int, ScopeRow] = {}
        inherited: dict[int, ScopeRow] = {}
        for scope in self.scopes:
            if scope.after is not None:
                scope.after = stands_for.get(id(scope.after), scope.after)
            if id(scope) in alive:
                scope.after = scope.after or inherited.pop(scope.thread, None)
                last[scope.thread] = scope
                stands_for[id(scope)] = scope
            else:
                if scope.after is not None:
                    inherited[scope.thread] = scope.after
                stands_for[id(scope)] = last.get(scope.thread)
        self.scopes = left

    def build(self) -> Program:
        """The program of the rows."""
        ops = [op for scope in self.scopes for op in scope.ops]
        place = {id(op): i for i, op in enumerate(ops)}
        symbolic: dict[Signature, int] = {}
        names = {name: i for i, name in enumerate(self.program.names)}
        alloc, free, keep = self._lifetimes(ops, place)
        new_storage = np.cumsum(keep) - 1
        used = np.array([keep[s] for s in self.tensors], dtype=np.bool_)
        new_tensor = np.cumsum(used) - 1
        scope_place = {id(scope): i for i, scope in enumerate(self.scopes)}
        columns = {
            "op_signature": [symbolic.setdefault(op.signature, len(symbolic)) for op in ops],
            "op_module": [op.module for op in ops],
            "op_forward": [-1 if op.forward is None else place.get(id(op.forward), -1) for op in ops],
            "op_stream": [op.stream for op in ops],
            "input_tensor": [new_tensor[t] for op in ops for t in op.inputs],
            "output_tensor": [new_tensor[t] for op in ops for t in op.outputs],
            "tensor_storage": [new_storage[s] for s in self.tensors if keep[s]],
            "storage_bytes": [row.size for row, kept in zip(self.storages, keep, strict=True) if kept],
            "storage_kind": [row.kind for row, kept in zip(self.storages, keep, strict=True) if kept],
            "storage_alloc": [first for first, kept in zip(alloc, keep, strict=True) if kept],
            "storage_free": [last for last, kept in zip(free, keep, strict=True) if kept],
            "scope_name": [names.setdefault(scope.name, len(names)) for scope in self.scopes],
            "scope_phase": [int(scope.phase) for scope in self.scopes],
            "scope_thread": [scope.thread for scope in self.scopes],
            "scope_after": [-1 if s.after is None else scope_place[id(s.after)] for s in self.scopes],
        }
        counts = {"input_ptr": [len(op.inputs) for op in ops], "output_ptr": [len(op.outputs) for op in ops],
                  "scope_ptr": [len(scope.ops) for scope in self.scopes]}  # fmt: skip
        arrays = {name: np.array(values, dtype=np.int32) for name, values in columns.items()}
        arrays |= {name: pointer(np.array(values, dtype=np.int32)) for name, values in counts.items()}
        return replace(self.program, symbolic=tuple(symbolic), names=tuple(names), columns=Columns(**arrays))

    def _lifetimes(self, ops: list[OpRow], place: dict[int, int]) -> tuple[list[int], list[int], list[bool]]:
        count = len(ops)
        first, last = [count] * len(self.storages), [-1] * len(self.storages)
        for number, op in enumerate(ops):
            for tensor in (*op.inputs, *op.outputs):
                storage = self.tensors[tensor]
                first[storage] = min(first[storage], number)
                last[storage] = number
        alloc, free, keep = [], [], []
        for row, begin, end in zip(self.storages, first, last, strict=True):
            start = -1 if not row.made else min(place.get(id(row.alloc), begin), begin)
            stop = count if row.lasts else max(place.get(id(row.free), end), end, 0)
            kept = end >= 0 or not row.made
            alloc.append(start if kept else 0)
            free.append(max(stop, start))
            keep.append(kept)
        return alloc, free, keep

"""A program as rows that can be changed one by one (ops, scopes, storages), and table rows that a step does not
hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from traincast.ir.assembly import BY_USE, NEVER, Draft, make_pointers
from traincast.ir.ops import DTYPE_BYTES, Phase, Signature
from traincast.ir.program import Program, find_stale_storages
from traincast.utils.arrays import Int32Array, IntArray
from traincast.utils.errors import TraincastError


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
    """Memory of `size` (an index of the sizes). With `made` the step allocates it in op `alloc`, otherwise it is there
    before; with `lasts` it outlives the step, otherwise it is freed after op `free`. None is the first or the last op
    that touches it, and so is an op that is gone."""

    size: int
    kind: int
    alloc: OpRow | None
    free: OpRow | None
    made: bool
    lasts: bool


class Rows:
    """The rows of a program: `ops` by their index in it, `scopes` in the order they run, `tensors` as the storage of
    every tensor. Storages that the step made go when no op touches them any more."""

    def __init__(self, program: Program) -> None:
        c = program.columns
        self.names = program.names
        self.ops = list(
            map(
                OpRow,
                [program.symbolic[number] for number in c.op_signature.tolist()],
                _split_rows(c.input_ptr, c.input_tensor),
                _split_rows(c.output_ptr, c.output_tensor),
                c.op_module.tolist(),
                c.op_stream.tolist(),
            )
        )
        ops, phases = self.ops, list(Phase)
        for row, forward in zip(ops, c.op_forward.tolist(), strict=True):
            row.forward = ops[forward] if forward >= 0 else None
        self.scopes = [
            ScopeRow(program.names[name], phases[phase], thread, ops[start:end])
            for name, phase, thread, (start, end) in zip(
                c.scope_name.tolist(), c.scope_phase.tolist(), c.scope_thread.tolist(),
                pairwise(c.scope_ptr.tolist()), strict=True,
            )
        ]  # fmt: skip
        for scope, after in zip(self.scopes, c.scope_after.tolist(), strict=True):
            scope.after = self.scopes[after] if after >= 0 else None
        self.tensors: list[int] = c.tensor_storage.tolist()
        columns = (c.storage_bytes, c.storage_kind, c.storage_alloc, c.storage_free)
        self.storages = [
            StorageRow(
                size, kind, ops[alloc] if 0 <= alloc < len(ops) else None, ops[free] if 0 <= free < len(ops) else None,
                alloc >= 0, free >= len(ops),
            )
            for size, kind, alloc, free in zip(*(column.tolist() for column in columns), strict=True)
        ]  # fmt: skip
        for storage in find_stale_storages(program):
            self.storages[storage].free = None

    def draft(self) -> Draft:
        """What the rows are now."""
        ops = [op for scope in self.scopes for op in scope.ops]
        place: dict[OpRow | None, int] = {op: index for index, op in enumerate(ops)}
        scope_place: dict[ScopeRow | None, int] = {scope: index for index, scope in enumerate(self.scopes)}
        scope_place[None] = -1
        names = {name: index for index, name in enumerate(self.names)}
        symbolic: dict[Signature, int] = {}
        known: dict[int, int] = {}  # most ops share signatures, which take long to hash
        signatures = [op.signature for op in ops]
        for signature in signatures:
            if id(signature) not in known:
                known[id(signature)] = symbolic.setdefault(signature, len(symbolic))
        storages = self.storages
        parts = {
            "op_signature": [known[id(signature)] for signature in signatures],
            "op_module": [op.module for op in ops],
            "op_forward": [place.get(op.forward, -1) for op in ops],
            "op_stream": [op.stream for op in ops],
            "input_tensor": [tensor for op in ops for tensor in op.inputs],
            "output_tensor": [tensor for op in ops for tensor in op.outputs],
            "tensor_storage": self.tensors,
            "storage_bytes": [row.size for row in storages],
            "storage_kind": [row.kind for row in storages],
            "storage_alloc": [place.get(row.alloc, BY_USE) if row.made else -1 for row in storages],
            "storage_free": [NEVER if row.lasts else place.get(row.free, BY_USE) for row in storages],
            "scope_name": [names.setdefault(scope.name, len(names)) for scope in self.scopes],
            "scope_phase": [int(scope.phase) for scope in self.scopes],
            "scope_thread": [scope.thread for scope in self.scopes],
            "scope_after": [scope_place[scope.after] for scope in self.scopes],
        }
        arrays: dict[str, IntArray | Int32Array] = {k: np.array(v, dtype=np.int64) for k, v in parts.items()}
        arrays["input_ptr"] = make_pointers(np.array([len(op.inputs) for op in ops], dtype=np.int64))
        arrays["output_ptr"] = make_pointers(np.array([len(op.outputs) for op in ops], dtype=np.int64))
        return Draft(
            symbolic=tuple(symbolic),
            names=tuple(names),
            parts=arrays,
            ops=np.arange(len(ops)),
            scopes=np.arange(len(self.scopes)),
            scope_counts=np.array([len(scope.ops) for scope in self.scopes], dtype=np.int64),
            old_ops=len(ops),
            removable=np.array([row.made for row in storages], dtype=np.bool_),
        )


def _split_rows(pointer: Int32Array, values: Int32Array) -> list[tuple[int, ...]]:
    flat = values.tolist()
    return [tuple(flat[start:end]) for start, end in pairwise(pointer.tolist())]


def count_bytes_left_out(program: Program) -> int:
    """Bytes of the table rows that lookups know of (`rows`, `dims`) and that occupy no memory of the step."""
    return sum(
        _count_left_out_of_lookup(signature) for signature in program.signatures if "embedding" in signature.name
    )


def _count_left_out_of_lookup(signature: Signature) -> int:
    rows, dims = signature.scalar("rows"), signature.scalar("dims")
    if "backward" in signature.name or not (isinstance(rows, tuple) and isinstance(dims, tuple) and signature.inputs):
        return 0
    weights = signature.inputs[0]
    if len(rows) != len(dims):
        raise TraincastError(
            f"op '{signature.name}' has {len(rows)} numbers of rows and {len(dims)} widths of its tables"
        )
    pairs = zip(rows, dims, strict=True)
    whole = sum(height * width for height, width in pairs if isinstance(height, int) and isinstance(width, int))
    return max(whole - weights.numel, 0) * DTYPE_BYTES[weights.dtype]

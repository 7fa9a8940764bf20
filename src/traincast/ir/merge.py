"""Edits that put one op in the place of several, or leave ops out that nothing needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.ir.edit import pointer, renumber
from traincast.ir.ops import Signature
from traincast.ir.program import Columns, Program
from traincast.utils.arrays import BoolArray, Int32Array, IntArray

_ENGINE = 1  # the thread of the backward pass


@dataclass(frozen=True, kw_only=True)
class Merged:
    """One op for several: it runs where the last of `members` (op indices, ascending) ran and takes its stream.

    `signature` has symbolic sizes; `inputs` and `outputs` are tensors of the program in the signature's order.
    """

    members: tuple[int, ...]
    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def merged(
    program: Program, groups: Sequence[Merged], dropped: Iterable[int], eager: BoolArray | None = None
) -> Program:
    """The program with every group as one op and without the `dropped` ops; a merged op has a scope of its own name,
    every other op left has one of its scope's name (ops of one node of the backward pass have one together). Memory
    that no op left touches, and that was not there before the step, is gone; the rest lives from the first to the last
    op left that touches it. Ops marked in `eager` stay in the scopes they were in."""
    at = {group.members[-1]: group for group in groups}
    gone = {member for group in groups for member in group.members} | set(dropped)
    left = [op for op in range(program.num_ops) if op in at or op not in gone]
    symbolic, op_signature = _signatures(program, [at.get(op) for op in left], left)
    names = {name: index for index, name in enumerate(program.names)}
    c, rows = program.columns, np.array(left, dtype=np.int64)
    first = _first_of_scopes(program, rows, None if eager is None else eager[rows], np.isin(rows, list(at)))
    scope = program.op_scope[rows[first]]
    threads = c.scope_thread[scope]
    inputs = [at[op].inputs if op in at else _span(c.input_ptr, c.input_tensor, op) for op in left]
    outputs = [at[op].outputs if op in at else _span(c.output_ptr, c.output_tensor, op) for op in left]
    storage = [{int(c.tensor_storage[t]) for t in (*i, *o)} for i, o in zip(inputs, outputs, strict=True)]
    keep, alloc, free = _lifetimes(program, storage)
    tensor = keep[c.tensor_storage]
    columns = Columns(
        op_signature=op_signature,
        op_module=c.op_module[rows],
        op_forward=np.full(len(left), -1, dtype=np.int32),
        op_stream=c.op_stream[rows],
        input_ptr=pointer(np.array([len(row) for row in inputs], dtype=np.int32)),
        input_tensor=renumber(tensor)[[t for row in inputs for t in row]],
        output_ptr=pointer(np.array([len(row) for row in outputs], dtype=np.int32)),
        output_tensor=renumber(tensor)[[t for row in outputs for t in row]],
        tensor_storage=renumber(keep)[c.tensor_storage[tensor]],
        storage_bytes=c.storage_bytes[keep],
        storage_kind=c.storage_kind[keep],
        storage_alloc=alloc[keep],
        storage_free=free[keep],
        scope_name=np.array(
            [
                names.setdefault(at[op].signature.name, len(names)) if op in at else c.scope_name[program.op_scope[op]]
                for op in rows[first].tolist()
            ],
            dtype=np.int32,
        ),
        scope_phase=c.scope_phase[scope],
        scope_thread=threads,
        scope_after=np.where(np.diff(threads, prepend=threads[:1]) != 0, np.arange(len(threads)) - 1, -1).astype(
            np.int32
        ),
        scope_ptr=np.append(first, len(left)).astype(np.int32),
    )
    return replace(program, symbolic=symbolic, names=tuple(names), columns=columns)


def _first_of_scopes(program: Program, rows: IntArray, eager: BoolArray | None, merged: BoolArray) -> IntArray:
    """Where in `rows` scopes begin: at every op that is not eager, and where the others change from one scope to the
    next. What one node of the backward pass calls one after the other stays together: the node is taken up once."""
    single = np.ones(len(rows), dtype=np.bool_) if eager is None else ~eager
    scope = program.op_scope[rows]
    changes = np.append(True, np.diff(scope) != 0)
    after_single, after_merged = (np.append(True, flags[:-1]) for flags in (single, merged))
    node = (program.columns.scope_thread[scope] == _ENGINE) & ~changes & ~merged & ~after_merged
    return np.flatnonzero((single | after_single | changes) & ~node)


def _signatures(
    program: Program, groups: Sequence[Merged | None], left: Sequence[int]
) -> tuple[tuple[Signature, ...], Int32Array]:
    """The signatures still in use, and which one every op left has."""
    distinct: dict[Signature, int] = {}
    chosen = [
        distinct.setdefault(group.signature if group else program.symbolic[indices], len(distinct))
        for group, indices in zip(groups, program.columns.op_signature[list(left)].tolist(), strict=True)
    ]
    return tuple(distinct), np.array(chosen, dtype=np.int32)


def _span(pointers: Int32Array, tensors: Int32Array, op: int) -> tuple[int, ...]:
    return tuple(tensors[pointers[op] : pointers[op + 1]].tolist())


def _lifetimes(program: Program, touched: Sequence[set[int]]) -> tuple[BoolArray, Int32Array, Int32Array]:
    """Which storages stay, and the op left that allocates and the one that frees each."""
    c, count = program.columns, len(touched)
    first, last = np.full(len(c.storage_bytes), count), np.full(len(c.storage_bytes), -1)
    for op, storages in enumerate(touched):
        indices = list(storages)
        first[indices] = np.minimum(first[indices], op)
        last[indices] = op
    made, outlives = c.storage_alloc >= 0, c.storage_free >= program.num_ops
    alloc = np.where(made, first, -1)
    free = np.where(outlives, count, np.maximum(last, 0))
    return (last >= 0) | ~made, alloc.astype(np.int32), free.astype(np.int32)

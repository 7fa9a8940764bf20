"""Edits of a workload that need no torch: leaving a phase out, renaming a type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from traincast.ir.ops import DTYPE_BYTES, Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.program import Columns, Program
from traincast.ir.workload import Workload
from traincast.utils.arrays import BoolArray, Int32Array
from traincast.utils.errors import TraincastError, unknown


def without_phase(workload: Workload, phase: Phase) -> Workload:
    """The workload without the scopes and ops of `phase`, and without the memory only they used."""
    return replace(workload, programs=tuple(_without_phase(program, phase) for program in workload.programs))


def with_dtype(workload: Workload, renames: Mapping[str, str]) -> Workload:
    """The workload with tensor types renamed, e.g. `{"bfloat16": "float16"}`; both must have the same size."""
    for old, new in renames.items():
        for name in (old, new):
            if name not in DTYPE_BYTES:
                raise unknown("dtype", name, DTYPE_BYTES, "Give torch's name without 'torch.'.")
        if DTYPE_BYTES[old] != DTYPE_BYTES[new]:
            raise TraincastError(f"{old} cannot become {new}: its elements have another size; capture again")
    return replace(workload, programs=tuple(_with_dtype(program, renames) for program in workload.programs))


def _without_phase(program: Program, phase: Phase) -> Program:
    c = program.columns
    keep_scope = c.scope_phase != phase
    if keep_scope.all():
        return program
    keep = keep_scope[program.op_scope]
    storage = _kept_storages(program, keep)
    tensor = storage[c.tensor_storage]
    in_kept = np.repeat(keep, np.diff(c.input_ptr))
    out_kept = np.repeat(keep, np.diff(c.output_ptr))
    used, op_signature = np.unique(c.op_signature[keep], return_inverse=True)
    alloc, free = _lifetimes(c, keep)
    columns = Columns(
        op_signature=op_signature.astype(np.int32),
        op_module=c.op_module[keep],
        op_forward=renumber(keep)[c.op_forward[keep]],
        op_stream=c.op_stream[keep],
        input_ptr=pointer(np.diff(c.input_ptr)[keep]),
        input_tensor=renumber(tensor)[c.input_tensor[in_kept]],
        output_ptr=pointer(np.diff(c.output_ptr)[keep]),
        output_tensor=renumber(tensor)[c.output_tensor[out_kept]],
        tensor_storage=renumber(storage)[c.tensor_storage[tensor]],
        storage_bytes=c.storage_bytes[storage],
        storage_kind=c.storage_kind[storage],
        storage_alloc=alloc[storage],
        storage_free=free[storage],
        scope_name=c.scope_name[keep_scope],
        scope_phase=c.scope_phase[keep_scope],
        scope_thread=c.scope_thread[keep_scope],
        scope_after=_scope_after(c, keep_scope),
        scope_ptr=pointer(np.diff(c.scope_ptr)[keep_scope]),
    )
    return replace(program, symbolic=tuple([program.symbolic[i] for i in used]), columns=columns)


def renumber(keep: BoolArray) -> Int32Array:
    """New index of everything kept and -1 for the rest; the extra last entry makes index -1 stay -1."""
    new = np.where(keep, np.cumsum(keep) - 1, -1)
    return np.append(new, -1).astype(np.int32)


def pointer(counts: Int32Array) -> Int32Array:
    """Where each of so many begins, and the end."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _lifetimes(c: Columns, keep: BoolArray) -> tuple[Int32Array, Int32Array]:
    """Allocating and freeing op of every storage: the next kept op and the last kept op."""
    before = np.concatenate(([0], np.cumsum(keep)))  # kept ops before op i
    alloc = np.where(c.storage_alloc < 0, -1, before[c.storage_alloc])
    last = before[np.minimum(c.storage_free, len(keep) - 1) + 1] - 1
    free = np.where(c.storage_free >= len(keep), before[-1], last)
    return alloc.astype(np.int32), np.maximum(free, alloc).astype(np.int32)


def _kept_storages(program: Program, keep: BoolArray) -> BoolArray:
    """All storages but those that only the dropped ops know: temporaries, optimizer state, host batches."""
    c = program.columns
    by_kept, by_dropped = (np.zeros(len(c.storage_bytes), dtype=np.bool_) for _ in range(2))
    for pointer, tensor in ((c.input_ptr, c.input_tensor), (c.output_ptr, c.output_tensor)):
        kept = np.repeat(keep, np.diff(pointer))
        by_kept[c.tensor_storage[tensor[kept]]] = True
        by_dropped[c.tensor_storage[tensor[~kept]]] = True
    made = c.storage_alloc >= 0
    by_dropped |= made & ~np.append(keep, True)[c.storage_alloc]
    # Without an op that shows it, a storage would no longer be known to lie on the host.
    removable = made | (c.storage_kind == StorageKind.OPTIMIZER_STATE) | program.storages.on_host
    kept_storages: BoolArray = by_kept | ~(by_dropped & removable)
    return kept_storages


def _scope_after(c: Columns, keep: BoolArray) -> Int32Array:
    """What every kept scope waits for.

    A dropped scope hands its own wait to the next kept scope of its thread (which ran after it); who waited for a
    dropped scope waits for the last kept scope of that thread instead.
    """
    stands_for: list[int] = []
    inherited: dict[int, int] = {}
    last: dict[int, int] = {}
    result: list[int] = []
    for kept, thread, after in zip(keep.tolist(), c.scope_thread.tolist(), c.scope_after.tolist(), strict=True):
        wait = max(stands_for[after] if after >= 0 else -1, inherited.pop(thread, -1))
        if kept:
            last[thread] = len(result)
            result.append(wait)
        else:
            inherited[thread] = wait
        stands_for.append(last.get(thread, -1))
    return np.array(result, dtype=np.int32)


def _with_dtype(program: Program, renames: Mapping[str, str]) -> Program:
    specs = {id(spec): spec for s in program.symbolic for spec in (*s.inputs, *s.outputs)}
    renamed = {
        key: replace(spec, dtype=renames[spec.dtype]) if spec.dtype in renames else spec for key, spec in specs.items()
    }
    distinct: dict[Signature, int] = {}
    new = [distinct.setdefault(_renamed(s, renames, renamed), len(distinct)) for s in program.symbolic]
    op_signature = np.array(new, dtype=np.int32)[program.columns.op_signature]
    return replace(program, symbolic=tuple(distinct), columns=replace(program.columns, op_signature=op_signature))


def _renamed(signature: Signature, renames: Mapping[str, str], specs: Mapping[int, TensorSpec]) -> Signature:
    """The signature with its tensors looked up in `specs` by identity: a few forms serve thousands of tensors."""

    def scalar(value: Scalar) -> Scalar:
        """A dtype passed as an argument is text: `bfloat16` or `torch.bfloat16`."""
        if isinstance(value, str) and value.removeprefix("torch.") in renames:
            bare = value.removeprefix("torch.")
            return value.removesuffix(bare) + renames[bare]
        return value

    return replace(
        signature,
        inputs=tuple([specs[id(spec)] for spec in signature.inputs]),
        outputs=tuple([specs[id(spec)] for spec in signature.outputs]),
        scalars=tuple([(name, scalar(value)) for name, value in signature.scalars]),
    )

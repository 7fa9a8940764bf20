"""A program as rows that can be changed one by one, and from edited rows back to columns: lifetimes of storages, who
waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from traincast.ir.ops import DTYPE_BYTES, Phase, Signature
from traincast.ir.program import Columns, Program, find_stale_storages
from traincast.utils.arrays import BoolArray, Int32Array, IntArray
from traincast.utils.errors import TraincastError

NEVER = int(np.iinfo(np.int32).max)
"""As the op that frees a storage: the storage outlives the step."""
BY_USE = -2
"""As the op that allocates or frees a storage: the first or the last op that touches it."""
_PER_OP = ("op_signature", "op_module", "op_stream")
_PER_SCOPE = ("scope_name", "scope_phase", "scope_thread")


@dataclass(frozen=True, eq=False, kw_only=True)
class Draft:
    """The parts of an edited program by handle, and the order of those that are left.

    `parts` has every column of a program but `scope_ptr`; what names an op, a scope, a tensor or a storage there is a
    handle. Ops with the first `old_ops` handles are in the order of the program before the edit. `ops` and `scopes`
    are handles in the new order, `scope_counts` the ops of every scope in that order. Storages in `removable` go when
    no op that is left touches them.
    """

    symbolic: tuple[Signature, ...]
    names: tuple[str, ...]
    parts: Mapping[str, IntArray | Int32Array]
    ops: IntArray
    scopes: IntArray
    scope_counts: IntArray
    old_ops: int
    removable: BoolArray


def assemble_columns(draft: Draft) -> Columns:
    """The columns. A storage whose allocating op is gone is allocated by the next op that is left, one whose freeing
    op is gone is freed after the op before; none begins after its first use or ends before its last."""
    parts, count = draft.parts, len(draft.ops)
    op_place = _invert_order(draft.ops, len(parts["op_signature"]))
    scope_place = _invert_order(draft.scopes, len(parts["scope_name"]))
    input_ptr, inputs = _select_rows(parts["input_ptr"], parts["input_tensor"], draft.ops)
    output_ptr, outputs = _select_rows(parts["output_ptr"], parts["output_tensor"], draft.ops)
    first, last = _find_uses(parts["tensor_storage"], ((input_ptr, inputs), (output_ptr, outputs)), draft)
    alloc, free = _settle_lifetimes(draft, op_place, first, last)
    kept = (last >= 0) | ~draft.removable
    tensor = kept[parts["tensor_storage"]]
    columns = {name: parts[name][draft.ops] for name in _PER_OP}
    columns |= {name: parts[name][draft.scopes] for name in _PER_SCOPE}
    columns |= {
        "op_forward": op_place[parts["op_forward"][draft.ops]],
        "input_ptr": input_ptr,
        "input_tensor": renumber_kept(tensor)[inputs],
        "output_ptr": output_ptr,
        "output_tensor": renumber_kept(tensor)[outputs],
        "tensor_storage": renumber_kept(kept)[parts["tensor_storage"][tensor]],
        "storage_bytes": parts["storage_bytes"][kept],
        "storage_kind": parts["storage_kind"][kept],
        "storage_alloc": alloc[kept],
        "storage_free": free[kept],
        "scope_after": scope_place[parts["scope_after"][draft.scopes]],
        "scope_ptr": make_pointers(draft.scope_counts),
    }
    assert columns["scope_ptr"][-1] == count
    return Columns(**{name: np.asarray(values, dtype=np.int32) for name, values in columns.items()})


def move_waits(threads: IntArray | Int32Array, after: IntArray, kept: BoolArray) -> IntArray:
    """For every scope, in the order they run, the scope that it waits for when only the `kept` ones are left (-1:
    none). This is the one rule of who waits for what was dropped.

    Who waited for a dropped scope waits for the last kept scope before it on its thread. What a dropped scope waited
    for, the next kept scope of its thread waits for; of several such waits the latest counts.

    >>> move_waits(np.array([0, 1, 0, 1]), np.array([-1, 0, 1, -1]), np.array([True, False, True, True])).tolist()
    [-1, -1, -1, 0]
    """
    count = len(threads)
    placeholder, heir = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for thread in np.unique(threads):
        mine = np.flatnonzero(threads == thread)
        placeholder[mine] = np.maximum.accumulate(np.where(kept[mine], mine, -1))
        heir[mine] = np.minimum.accumulate(np.where(kept[mine], mine, count)[::-1])[::-1]
    waits = np.full(count + 1, -1, dtype=np.int64)  # the last for those that have no heir
    np.maximum.at(waits, heir, np.where(after >= 0, np.append(placeholder, -1)[after], -1))
    return waits[:count]


def renumber_kept(kept: BoolArray) -> Int32Array:
    """New index of everything kept and -1 for the rest; the extra last entry makes index -1 stay -1."""
    new = np.where(kept, np.cumsum(kept) - 1, -1)
    return np.append(new, -1).astype(np.int32)


def make_pointers(counts: IntArray | Int32Array) -> IntArray:
    """Where each of this many begins, and the end."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def _invert_order(order: IntArray, handles: int) -> IntArray:
    """The place of every handle; -1 for one that is gone, and for the handles -1 and -2."""
    place = np.full(handles + 2, -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    return place


def _select_rows(
    pointer: IntArray | Int32Array, values: IntArray | Int32Array, order: IntArray
) -> tuple[IntArray, IntArray | Int32Array]:
    """Pointer and entries of these rows, in this order."""
    counts = np.diff(pointer)[order]
    new = make_pointers(counts)
    shift = np.repeat(pointer[:-1][order] - new[:-1], counts)
    return new, values[np.arange(len(shift)) + shift]


def _find_uses(
    tensor_storage: IntArray | Int32Array,
    operands: Sequence[tuple[IntArray, IntArray | Int32Array]],
    draft: Draft,
) -> tuple[IntArray, IntArray]:
    """The first and the last op that touches every storage; the number of ops and -1 for one that none touches."""
    count, storages = len(draft.ops), len(draft.removable)
    first, last = np.full(storages, count, dtype=np.int64), np.full(storages, -1, dtype=np.int64)
    for pointer, tensors in operands:
        touched = tensor_storage[tensors]
        ops = np.repeat(np.arange(count), np.diff(pointer))
        begin, end = np.full(storages, count, dtype=np.int64), np.full(storages, -1, dtype=np.int64)
        end[touched] = ops  # ascending, so that the last one stays
        begin[touched[::-1]] = ops[::-1]
        first, last = np.minimum(first, begin), np.maximum(last, end)
    return first, last


def _settle_lifetimes(draft: Draft, place: IntArray, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """The op that allocates and the one that frees every storage."""
    count, old = len(draft.ops), draft.old_ops
    next_left, last_left = place.copy(), place.copy()
    gone = place[:old] < 0
    if gone.any():
        next_left[:old] = np.minimum.accumulate(np.where(gone, count, place[:old])[::-1])[::-1]
        last_left[:old] = np.maximum.accumulate(place[:old])
    # what no op touches was freed before the first one, which programs note as freed after it
    next_left[BY_USE], last_left[BY_USE] = count, min(int(place[0]), 0)
    alloc, free = draft.parts["storage_alloc"], draft.parts["storage_free"]
    born = np.where(alloc == -1, -1, np.minimum(next_left[alloc], first))
    freed = np.maximum(last_left[np.where(free == NEVER, BY_USE, free)], last)
    return born, np.maximum(np.where(free == NEVER, count, freed), born)


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

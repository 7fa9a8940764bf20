"""From the parts of an edited program to its columns: numbers, lifetimes of storages, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from traincast.ir.ops import Signature
from traincast.ir.program import Columns
from traincast.utils.arrays import BoolArray, Int32Array, IntArray

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

"""What is kept of an execution trace: one row per node, whatever dialect it was written in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from traincast.traces.tables import Table
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError

NODE = np.dtype(
    [
        ("id", "i8"),
        ("parent", "i8"),  # id of the node it was called from, or 0
        ("record_function", "i8"),  # or -1
        ("sequence", "i8"),  # or -1
        ("forward_parent", "i8"),  # or 0
        ("start", "i8"),  # nanoseconds, or -1
        ("duration", "i8"),  # nanoseconds, or -1
        ("thread", "i8"),
        ("name", "i4"),  # index into names
        ("details", "i4"),  # index into details
        ("schema", "i4"),  # index into schemas
        ("scope", "i4"),  # torch's RecordScope, or Chakra's node type
    ]
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ExecutionTrace:
    """A PyTorch execution trace or a Chakra trace, as columns in file order (see `NODE`).

    `details` are shapes and types of inputs and outputs as JSON (values too where an op communicates), shared by equal
    nodes. `needs` are the ids each node depends on: those of row i are `needs[needs_ptr[i] : needs_ptr[i + 1]]`.
    """

    path: Path
    schema: str
    nodes: Table
    names: tuple[str, ...]
    details: tuple[bytes, ...]
    schemas: tuple[str, ...]
    needs: IntArray
    needs_ptr: IntArray
    notes: tuple[str, ...] = field(default=())


def check_acyclic(trace: ExecutionTrace) -> None:
    """Rejects a trace in which a node is called from itself or needs itself, however indirectly."""
    ids = trace.nodes["id"]
    order = np.argsort(ids, kind="stable")
    parents = find_rows(ids[order], order, trace.nodes["parent"])
    roots = parents == np.arange(len(ids))
    parents[roots] = -1  # the process is its own parent
    at = parents.copy()
    for _ in range(max(len(ids), 1).bit_length()):  # each round doubles the distance looked back
        at = np.where(at >= 0, at[np.maximum(at, 0)], -1)
    if (at >= 0).any():
        looped = int(ids[int(np.argmax(at >= 0))])
        raise TraincastError(f"'{trace.path}' calls in a circle: node {looped} is its own ancestor")
    if len(trace.needs):
        _check_needs(trace, find_rows(ids[order], order, trace.needs))


def _check_needs(trace: ExecutionTrace, needs: IntArray) -> None:
    """Kahn's algorithm: nodes whose needs are all met are taken away until none is left."""
    count = len(trace.nodes)
    user = np.repeat(np.arange(count), np.diff(trace.needs_ptr))
    known = needs >= 0
    needs, user = needs[known], user[known]
    open_needs = np.bincount(user, minlength=count).tolist()
    order = np.argsort(needs, kind="stable")
    users = user[order].tolist()
    first = np.searchsorted(needs[order], np.arange(count + 1)).tolist()
    ready = [row for row, left in enumerate(open_needs) if left == 0]
    done = 0
    while ready:
        row = ready.pop()
        done += 1
        for other in users[first[row] : first[row + 1]]:
            open_needs[other] -= 1
            if not open_needs[other]:
                ready.append(other)
    if done < count:
        stuck = int(trace.nodes["id"][next(row for row, left in enumerate(open_needs) if left)])
        raise TraincastError(f"'{trace.path}' has dependencies in a circle, node {stuck} among them")


def find_rows(sorted_keys: IntArray, order: IntArray, wanted: IntArray) -> IntArray:
    """The row (through `order`) of each wanted key, or -1. Of equal keys the first row counts."""
    if not len(sorted_keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == wanted, order[place], -1)

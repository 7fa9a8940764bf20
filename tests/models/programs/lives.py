"""When storages of a program live, counted in some of its ops."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from traincast.ir import Program, StorageKind


class Life(NamedTuple):
    """A device storage: its bytes, which of the ops allocates it (-1: there before the step, -2: another op), and how
    many of them have run when it goes."""

    nbytes: int
    kind: StorageKind
    alloc: int
    free: int


def lives(program: Program, ops: Sequence[int]) -> list[Life]:
    """The life of every storage that has bytes; `ops` are indices of the program, in order."""
    c = program.columns
    numbers = {op: number for number, op in enumerate(ops)}
    rows = zip(
        program.storage_nbytes.tolist(), c.storage_kind.tolist(), c.storage_alloc.tolist(), c.storage_free.tolist(),
        program.storages.on_host.tolist(), strict=True,
    )  # fmt: skip
    return [
        Life(nbytes, StorageKind(kind), -1 if alloc < 0 else numbers.get(alloc, -2), bisect_right(ops, free))
        for nbytes, kind, alloc, free, on_host in rows
        if nbytes and not on_host
    ]

"""New scopes and ops between those of a program, written as a `ProgramBuilder` writes whole ones."""

from __future__ import annotations

import numpy as np

from traincast.ir.assembly import BY_USE, NEVER
from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import Phase, Signature
from traincast.ir.program import Columns, Program, find_stale_storages
from traincast.ir.size_book import SizeBook
from traincast.utils.arrays import Int32Array, IntArray


class Insertion(ProgramBuilder):
    """What a `ProgramEditor` inserts. New scopes come before the scope that `insert_before` names, new ops at the end
    of the scope that was opened last, or that `append_to` names, both in the order they are written.

    Scopes, ops, tensors and storages of the program are named by their index, new ones by what the methods return.
    Sizes are plain numbers, which stay when the program is resized.
    """

    def __init__(self, program: Program, sizes: SizeBook) -> None:
        super().__init__(batch_size=program.batch_size, seq_len=program.seq_len)
        c, self.program = program.columns, program
        self._ops_before, self._scopes_before = program.num_ops, program.num_scopes
        self._tensors_before, self._storages_before = len(c.tensor_storage), len(c.storage_bytes)
        self._number_size = sizes.constant
        self._names.of.update({name: index for index, name in enumerate(program.names)})
        self._before = 0
        self._scope_before: list[int] = []
        self._freed: dict[int, int] = {}
        self._waits: dict[int, int] = {}
        self._numbers: dict[tuple[Signature, tuple[type, ...]], int] = {}
        self.symbolic = program.symbolic

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the program and new ones."""
        return tuple(self._names.of)

    @property
    def last_scope(self) -> int:
        """The new scope that was opened last (-1: none)."""
        return self.num_scopes - 1 if self._scope_before else -1

    def insert_before(self, scope: int) -> None:
        """New scopes come before this one of the program (their number: at the end)."""
        self._before = scope

    def append_to(self, scope: int) -> None:
        """New ops come at the end of this scope."""
        self._place = scope

    def set_wait(self, scope: int, after: int | None = None) -> None:
        """A scope, new or not, waits for another (None: for the one that new ops go to)."""
        self._waits[scope] = self._place if after is None else after

    def free_storage(self, storage: int) -> None:
        """The storage, new or not, is released after the last new op."""
        self._freed[storage] = self.num_ops - 1

    def open_scope(self, name: str, phase: Phase, *, thread: int = 0, after: int = -1) -> int:
        """Opens a new top-level host op; the ops that follow belong to it."""
        self._scope_before.append(self._before)
        return super().open_scope(name, phase, thread=thread, after=after)

    def _number_signature(self, signature: Signature) -> int:
        """What is inserted has few signatures, many times each; types tell arguments 1 and 1.0 apart."""
        key = (signature, tuple([type(value) for _, value in signature.scalars]))
        if key not in self._numbers:
            self._numbers[key] = super()._number_signature(signature)
        return self._numbers[key]

    def parts(self) -> tuple[dict[str, IntArray | Int32Array], IntArray, IntArray]:
        """All columns by handle, with what is new behind what was there; the scope of every op; the order of scopes."""
        program, c = self.program, self.program.columns
        new: dict[str, Int32Array] = {name: np.array(v, dtype=np.int32) for name, v in self._column.items()}
        new["op_signature"] = self._join_signatures()[new["op_signature"]]
        for pointer in ("input_ptr", "output_ptr"):
            new[pointer] = new[pointer][1:] + getattr(c, pointer)[-1]
        parts = {name: np.concatenate([getattr(c, name), new[name]]) for name in Columns.names()}
        free = parts["storage_free"]
        free[: len(c.storage_free)][c.storage_free >= program.num_ops] = NEVER
        free[find_stale_storages(program)] = BY_USE
        free[list(self._freed)] = list(self._freed.values())
        parts["scope_after"][list(self._waits)] = list(self._waits.values())
        op_scope = np.concatenate([program.op_scope, np.array(self._op_scope, dtype=np.int64)])
        old = program.num_scopes
        before = np.concatenate([np.arange(old), np.array(self._scope_before, dtype=np.int64)])
        places = np.arange(len(before))
        return parts, op_scope, np.lexsort((places, places < old, before))

    def _join_signatures(self) -> Int32Array:
        """The numbers of new signatures among all, which `symbolic` then are."""
        known: dict[Signature, int] = {}
        if self._signatures.of:
            known = {signature: index for index, signature in enumerate(self.program.symbolic)}
        numbers = [known.setdefault(signature, len(known)) for signature in self._signatures.of]
        self.symbolic = tuple(known) or self.program.symbolic
        return np.array(numbers, dtype=np.int32)

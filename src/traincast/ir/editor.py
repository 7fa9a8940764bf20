"""The one editor of programs: ops and scopes are dropped, merged, replaced and inserted, then it is a program again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property

import numpy as np

from traincast.ir.assembly import Draft, assemble_columns, move_waits
from traincast.ir.insertion import Insertion
from traincast.ir.ops import Signature, StorageKind
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, Rows, ScopeRow, StorageRow
from traincast.ir.size_book import SizeBook
from traincast.ir.validate import check_structure
from traincast.utils.arrays import BoolArray, Int32Array, IntArray


class ProgramEditor:
    """A program that is being changed; `build` gives what it has become. The program it began with stays as it is.

    There are two ways to edit, and an edit keeps to one of them. On columns it is fast however long the program is:
    `drop_scopes`, `rename_scopes`, `change_signatures`, and `insertion`, which writes new scopes and ops as a
    `ProgramBuilder` does. On rows, every op can be looked at and changed: `scopes`, `ops`, `storages` and `tensors`
    (the storage of each) may be reordered, extended and shortened freely. Sizes of new ops are added to `sizes`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = SizeBook(program.sizes)
        self._dropped: BoolArray | None = None
        self._rows: Rows | None = None

    def build(self) -> Program:
        """The program as it is now, checked."""
        program = self.program
        if not self._is_begun:
            return program
        draft = self._draft_columns() if self._rows is None else self._rows.draft()
        built = replace(
            program,
            sizes=self.sizes.table(),
            symbolic=draft.symbolic,
            names=draft.names,
            columns=assemble_columns(draft),
        )
        check_structure(built)
        return built

    @property
    def _is_begun(self) -> bool:
        """Whether ops or scopes were changed, or may have been."""
        return self._rows is not None or self._dropped is not None or "insertion" in self.__dict__

    # edits of rows

    @property
    def rows(self) -> Rows:
        """The program as rows; what they are when `build` is called is what the program becomes."""
        if self._rows is None:
            assert not self._is_begun, "an edit keeps to columns or to rows"
            self._rows = Rows(self.program)
        return self._rows

    @cached_property
    def ops(self) -> list[OpRow]:
        """The ops of the program it began with, by their index."""
        return self.rows.ops

    @property
    def scopes(self) -> list[ScopeRow]:
        """The scopes with their ops, in the order they run."""
        return self.rows.scopes

    @scopes.setter
    def scopes(self, scopes: list[ScopeRow]) -> None:
        self.rows.scopes = scopes

    @cached_property
    def tensors(self) -> list[int]:
        """The storage of every tensor."""
        return self.rows.tensors

    @cached_property
    def storages(self) -> list[StorageRow]:
        """The storages."""
        return self.rows.storages

    def get_storage(self, tensor: int) -> StorageRow:
        """The memory of a tensor."""
        return self.storages[self.tensors[tensor]]

    def add_tensor(self, size: int, kind: int, *, made: bool = True) -> int:
        """A tensor on memory of its own, made by the step or there before it; `size` is an index of the sizes."""
        self.storages.append(StorageRow(size, int(kind), None, None, made, not made))
        return self.add_view(len(self.storages) - 1)

    def add_view(self, storage: int) -> int:
        """One more tensor on memory that is there."""
        self.tensors.append(storage)
        return len(self.tensors) - 1

    def drop_ops(self, gone: AbstractSet[OpRow]) -> None:
        """Takes ops out, and scopes that then hold none any more."""
        kept = []
        for scope in self.scopes:
            left = [op for op in scope.ops if op not in gone]
            if left or not scope.ops:
                kept.append(scope)
            scope.ops = left
        self._keep_scopes(kept)

    def _keep_scopes(self, kept: list[ScopeRow]) -> None:
        scopes, alive = self.scopes, set(kept)
        place = {scope: index for index, scope in enumerate(scopes)}
        waits = move_waits(
            np.array([scope.thread for scope in scopes], dtype=np.int64),
            np.array([-1 if scope.after is None else place[scope.after] for scope in scopes], dtype=np.int64),
            np.array([scope in alive for scope in scopes], dtype=np.bool_),
        )
        for scope, wait in zip(scopes, waits.tolist(), strict=True):
            scope.after = scopes[wait] if wait >= 0 else None
        self.scopes = kept

    def merge_ops(
        self, members: Sequence[int], signature: Signature, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> set[OpRow]:
        """Lets the last of several ops (indices, ascending) stand for all of them; gives the others, which are to be
        dropped."""
        *others, last = (self.ops[member] for member in members)
        last.signature, last.inputs, last.outputs = signature, inputs, outputs
        return set(others)

    def merge_scopes(self, became: Mapping[ScopeRow, ScopeRow], scopes: list[ScopeRow]) -> None:
        """Puts `scopes` in the place of all; who waited for a scope that went into another waits for what it
        `became`."""
        for scope in scopes:
            waited = None if scope.after is None else became.get(scope.after, scope.after)
            scope.after = None if waited is scope else waited
        self.scopes = scopes

    # edits of columns

    @cached_property
    def insertion(self) -> Insertion:
        """Writes new scopes and ops between those of the program."""
        assert self._rows is None, "an edit keeps to columns or to rows"
        return Insertion(self.program, self.sizes)

    def drop_scopes(self, dropped: BoolArray) -> None:
        """Takes scopes out with their ops, and the memory that only those knew: what the step made, state of the
        optimizer and memory of the host."""
        assert self._rows is None, "an edit keeps to columns or to rows"
        self._dropped = dropped if self._dropped is None else self._dropped | dropped

    def rename_scopes(self, chosen: BoolArray, prefix: str) -> None:
        """Puts a prefix before the names of scopes; comes before other edits."""
        assert not self._is_begun
        program, c = self.program, self.program.columns
        names = {name: index for index, name in enumerate(program.names)}
        scope_name = c.scope_name.copy()
        for number in np.unique(c.scope_name[chosen]).tolist():
            new = names.setdefault(prefix + program.names[number], len(names))
            scope_name[chosen & (c.scope_name == number)] = new
        self.program = replace(program, names=tuple(names), columns=replace(c, scope_name=scope_name))

    def change_signatures(self, change: Callable[[Signature], Signature]) -> None:
        """Gives all ops the signatures that `change` makes of theirs (sizes are symbolic); comes before other edits."""
        assert not self._is_begun
        program = self.program
        distinct: dict[Signature, int] = {}
        new = [distinct.setdefault(change(signature), len(distinct)) for signature in program.symbolic]
        columns = replace(program.columns, op_signature=np.array(new, dtype=np.int32)[program.columns.op_signature])
        self.program = replace(program, symbolic=tuple(distinct), columns=columns)

    def _draft_columns(self) -> Draft:
        program = self.program
        parts, op_scope, scopes = self.insertion.parts()
        dropped = np.zeros(len(scopes), dtype=np.bool_)
        if self._dropped is not None:
            dropped[: program.num_scopes] = self._dropped
            parts["scope_after"] = _move_waits(parts, scopes, ~dropped)
        place = np.empty_like(scopes)
        place[scopes] = np.arange(len(scopes))
        ops = np.argsort(place[op_scope], kind="stable")
        ops, kept = ops[~dropped[op_scope[ops]]], scopes[~dropped[scopes]]
        used, numbers = np.unique(parts["op_signature"][ops], return_inverse=True)
        parts["op_signature"][ops] = numbers
        symbolic = self.insertion.symbolic
        return Draft(
            symbolic=tuple([symbolic[number] for number in used.tolist()]),
            names=self.insertion.names,
            parts=parts,
            ops=ops,
            scopes=kept,
            scope_counts=np.bincount(op_scope, minlength=len(scopes))[kept],
            old_ops=program.num_ops,
            removable=_find_removable(program, dropped[op_scope], len(parts["storage_bytes"])),
        )


def _move_waits(parts: Mapping[str, IntArray | Int32Array], scopes: IntArray, kept: BoolArray) -> IntArray:
    """`scope_after` by handle, when only the scopes of `kept` are left."""
    place = np.full(len(scopes) + 1, -1, dtype=np.int64)
    place[scopes] = np.arange(len(scopes))
    waits = move_waits(parts["scope_thread"][scopes], place[parts["scope_after"][scopes]], kept[scopes])
    moved = np.empty_like(scopes)
    moved[scopes] = np.append(scopes, -1)[waits]
    return moved


def _find_removable(program: Program, gone: BoolArray, storages: int) -> BoolArray:
    """Storages that dropped ops know and that go unless other ops know them: what the step made, state of the
    optimizer, and memory of the host, which nothing would show to be that any more."""
    c = program.columns
    removable = np.zeros(storages, dtype=np.bool_)
    if not gone.any():
        return removable
    gone = gone[: program.num_ops]
    known = removable[: len(c.storage_bytes)]
    for pointer, tensor in ((c.input_ptr, c.input_tensor), (c.output_ptr, c.output_tensor)):
        known[c.tensor_storage[tensor[np.repeat(gone, np.diff(pointer))]]] = True
    made = c.storage_alloc >= 0
    known |= made & np.append(gone, False)[c.storage_alloc]
    known &= made | (c.storage_kind == StorageKind.OPTIMIZER_STATE) | program.storages.on_host
    return removable


class TensorCopies:
    """Tensors that copies of ops use in the place of those of the ops: tensors on storages of which `is_own` says so
    are on a copy of their storage, others stay. `tensor` and `storage` give what became of each."""

    def __init__(self, editor: ProgramEditor, is_own: Callable[[int], bool]) -> None:
        self.editor, self.is_own = editor, is_own
        self.tensor: dict[int, int] = {}
        self.storage: dict[int, int] = {}

    def copy(self, tensors: Iterable[int]) -> tuple[int, ...]:
        """The tensors that stand for these."""
        return tuple([self._copy_one(tensor) for tensor in tensors])

    def _copy_one(self, tensor: int) -> int:
        editor = self.editor
        old = editor.tensors[tensor]
        if tensor in self.tensor or not self.is_own(old):
            return self.tensor.get(tensor, tensor)
        if old in self.storage:
            self.tensor[tensor] = editor.add_view(self.storage[old])
        else:
            self.tensor[tensor] = editor.add_tensor(editor.storages[old].size, editor.storages[old].kind)
            self.storage[old] = len(editor.storages) - 1
        return self.tensor[tensor]

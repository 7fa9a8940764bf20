"""The one editor of programs: ops and scopes are dropped, merged, replaced and inserted, phases left out, types
renamed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property

import numpy as np

from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import DTYPE_BYTES, Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.program import Columns, Program, find_stale_storages
from traincast.ir.rows import BY_USE, NEVER, Draft, OpRow, Rows, ScopeRow, StorageRow, assemble_columns, move_waits
from traincast.ir.sizes import SizeBook
from traincast.ir.validate import check_structure
from traincast.ir.workload import Workload
from traincast.utils.arrays import BoolArray, Int32Array, IntArray
from traincast.utils.errors import TraincastError, make_unknown_error


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


def remove_phase(workload: Workload, phase: Phase) -> Workload:
    """The workload without the scopes and ops of `phase`, and without the memory only they used."""
    return replace(workload, programs=tuple(_remove_program_phase(program, phase) for program in workload.programs))


def drop_host_scopes(program: Program) -> Program:
    """The program without the scopes all of whose ops work on pageable memory of the host alone."""
    editor = ProgramEditor(program)
    editor.drop_scopes(find_host_scopes(program))
    return editor.build()


def find_host_scopes(program: Program) -> BoolArray:
    """Which scopes have ops, all of them on pageable memory of the host."""
    specs = [(*signature.inputs, *signature.outputs) for signature in program.symbolic]
    on_host = np.array([bool(row) and all(spec.device == "cpu" for spec in row) for row in specs], dtype=np.bool_)
    others = program.op_scope[~on_host[program.columns.op_signature]]
    found: BoolArray = np.diff(program.columns.scope_ptr) > 0
    found[others] = False
    return found


def rename_dtypes(workload: Workload, renames: Mapping[str, str]) -> Workload:
    """The workload with tensor types renamed, e.g. `{"bfloat16": "float16"}`; both must have the same size."""
    for old, new in renames.items():
        for name in (old, new):
            if name not in DTYPE_BYTES:
                raise make_unknown_error("dtype", name, DTYPE_BYTES, "Give torch's name without 'torch.'.")
        if DTYPE_BYTES[old] != DTYPE_BYTES[new]:
            raise TraincastError(f"{old} cannot become {new}: its elements have another size; capture again")
    return replace(workload, programs=tuple(_rename_program_dtypes(program, renames) for program in workload.programs))


def _remove_program_phase(program: Program, phase: Phase) -> Program:
    dropped = program.columns.scope_phase == phase
    if not dropped.any():
        return program
    editor = ProgramEditor(program)
    editor.drop_scopes(dropped)
    return editor.build()


def _rename_program_dtypes(program: Program, renames: Mapping[str, str]) -> Program:
    specs = {id(spec): spec for s in program.symbolic for spec in (*s.inputs, *s.outputs)}
    renamed = {
        key: replace(spec, dtype=renames[spec.dtype]) if spec.dtype in renames else spec for key, spec in specs.items()
    }
    editor = ProgramEditor(program)
    editor.change_signatures(lambda signature: _rename_signature_dtypes(signature, renames, renamed))
    return editor.build()


def _rename_signature_dtypes(
    signature: Signature, renames: Mapping[str, str], specs: Mapping[int, TensorSpec]
) -> Signature:
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

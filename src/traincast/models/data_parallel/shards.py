"""Memory and update of a rank that keeps shards: smaller tensors, gathered parameters in the place of its own."""

from __future__ import annotations

from dataclasses import replace

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import ACCUMULATE_GRAD, Phase, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow
from traincast.models.data_parallel.shard_builder import Marks
from traincast.models.data_parallel.units import ADD, CAST, Pass, find_passes

_STATE = (StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)


def keep_shards(program: Program, before: Program, marks: Marks, *, parts: int, zero: int) -> Program:
    """A program into which communication was written, that keeps one of `parts` of what ranks share; `before` is the
    program without it. `zero` is DeepSpeed's number of what is shared."""
    edit = _ShardEdit(program, before, marks, parts, zero)
    edit.change_ops()
    edit.change_storages()
    return edit.editor.build()


class _ShardEdit:
    def __init__(self, program: Program, before: Program, marks: Marks, parts: int, zero: int) -> None:
        self.editor, self.marks, self.parts, self.zero = ProgramEditor(program), marks, parts, zero
        self.batch_size, self.seq_len = program.batch_size, program.seq_len
        self.old_tensors = len(before.columns.tensor_storage)
        self.old_storages = len(before.columns.storage_bytes)
        self.on_host = before.storages.on_host.tolist()
        self._views: dict[tuple[object, int], int] = {}
        self._forms: dict[TensorSpec, TensorSpec] = {}
        self._in_passes: set[int] = set()
        self._in_update: set[int] = set()

    def change_ops(self) -> None:
        """Ops of passes use gathered parameters, those of the update shards."""
        editor, gone = self.editor, set()
        passes = find_passes([int(scope.phase) for scope in editor.scopes])
        for scope, place in zip(editor.scopes, passes, strict=True):
            touched = self._in_passes if place is not None or scope.phase == Phase.INPUT else self._in_update
            for op in scope.ops:
                touched.update(editor.tensors[tensor] for tensor in (*op.inputs, *op.outputs))
        for scope, place in zip(editor.scopes, passes, strict=True):
            for op in scope.ops:
                if place is not None and self._is_replaced(op, scope.name, place):
                    gone.add(op)
                elif place is not None:
                    op.inputs = tuple([self._gathered(tensor, place) for tensor in op.inputs])
                    op.outputs = tuple([self._gathered(tensor, place) for tensor in op.outputs])
                elif scope.phase != Phase.INPUT:
                    self._share_update(op, scope.phase)
        editor.drop_ops(gone)

    def _is_replaced(self, op: OpRow, scope: str, place: Pass) -> bool:
        """Whether an op is done on shards: casts of parameters, and sums of gradients that ranks share."""
        if op.signature.name == CAST and not place[1]:
            return op.inputs[0] < self.old_tensors and self.editor.tensors[op.inputs[0]] in self.marks.cast_in_shards
        sums = scope == ACCUMULATE_GRAD and op.signature.name == ADD and op.inputs[0] < self.old_tensors
        return sums and self.editor.tensors[op.inputs[0]] in self.marks.summed

    def _gathered(self, tensor: int, place: Pass) -> int:
        if tensor >= self.old_tensors:
            return tensor
        storage = self.marks.gathered.get((place, self.editor.tensors[tensor]))
        return tensor if storage is None else self._view(place, tensor, storage)

    def _view(self, key: object, tensor: int, storage: int) -> int:
        if (key, tensor) not in self._views:
            self._views[key, tensor] = self.editor.add_view(storage)
        return self._views[key, tensor]

    def _share_update(self, op: OpRow, phase: Phase) -> None:
        """Gives an op of the update the shards of what it works on."""
        inputs = [self._share(*one, phase) for one in zip(op.inputs, op.signature.inputs, strict=True)]
        outputs = [self._share(*one, phase) for one in zip(op.outputs, op.signature.outputs, strict=True)]
        forms = (tuple([form for _, form in side]) for side in (inputs, outputs))
        op.inputs, op.outputs = (tuple([tensor for tensor, _ in side]) for side in (inputs, outputs))
        op.signature = _replace_forms(op.signature, *forms)

    def _share(self, tensor: int, form: TensorSpec, phase: Phase) -> tuple[int, TensorSpec]:
        if tensor >= self.old_tensors:
            return tensor, form
        storage = self.editor.tensors[tensor]
        kind, shard = self.editor.storages[storage].kind, self.marks.reduced.get(storage)
        if storage in self.marks.whole and phase != Phase.OPTIMIZER:
            return tensor, form
        if shard is not None:
            return self._view("update", tensor, shard), self._divide_form(form)
        if kind in _STATE or (phase == Phase.OPTIMIZER and storage not in self._in_passes):
            return tensor, self._divide_form(form)
        return tensor, form

    def _divide_form(self, form: TensorSpec) -> TensorSpec:
        if form not in self._forms:
            shape = (self._divide_size(form.shape[0]), *form.shape[1:]) if form.shape else ()
            self._forms[form] = replace(form, shape=shape)
        return self._forms[form]

    def _divide_size(self, size: int) -> int:
        sizes = self.editor.sizes
        return sizes.constant(-(-sizes.at(size, self.batch_size, self.seq_len) // self.parts))

    def change_storages(self) -> None:
        """Memory of shards, and of whole tensors only as long as they are used."""
        lasting = {
            shard: any(self.editor.storages[one].lasts for one, to in self.marks.reduced.items() if to == shard)
            for shard in set(self.marks.reduced.values())
        }
        for storage, row in enumerate(self.editor.storages):
            if storage in lasting:
                row.lasts, row.free = lasting[storage], None
        for storage in set(self.marks.gathered.values()):
            self.editor.storages[storage].lasts, self.editor.storages[storage].free = False, None
        for storage, row in enumerate(self.editor.storages[: self.old_storages]):
            if self.on_host[storage]:
                continue
            if storage in self.marks.reduced and self.zero > 1 and row.made:
                row.lasts, row.free = False, None
            elif self._is_shared(storage, row.kind, made=row.made):
                row.size = self._divide_size(row.size)

    def _is_shared(self, storage: int, kind: int, *, made: bool) -> bool:
        """Whether a rank keeps only a part of a storage."""
        if kind == StorageKind.PARAMETER:
            return self.zero == 3
        if kind == StorageKind.GRADIENT:
            return self.zero > 1 and storage not in self.marks.whole and not made
        only_update = made and storage in self._in_update and storage not in self._in_passes
        return kind == StorageKind.OPTIMIZER_STATE or only_update


def _replace_forms(signature: Signature, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Signature:
    same = inputs == signature.inputs and outputs == signature.outputs
    return signature if same else replace(signature, inputs=inputs, outputs=outputs)

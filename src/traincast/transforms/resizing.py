"""Tensors of a step whose first dimension becomes another, with all that only copies them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow
from traincast.utils.errors import TraincastError

_COPIES = ("aten::_to_copy", "aten::clone", "aten::copy_", "aten::detach", "aten::lift_fresh", "aten::alias")
"""Ops whose tensors all have one form."""


class Resizing:
    """A program with other first dimensions of some memory; `build` writes it. All tensors of such memory have one
    form, and nothing but ops that are told of it (`allow`) and copies use them."""

    def __init__(self, program: Program) -> None:
        self.program, self.editor = program, ProgramEditor(program)
        self.sizes = self.editor.sizes
        self.values: list[int] = program.size_values.tolist()
        self._forms: dict[int, TensorSpec] = {}
        self._users: dict[int, list[OpRow]] = defaultdict(list)
        self._new: dict[int, Callable[[int], int]] = {}
        self._whole: set[int] = set()  # memory whose tensors are all of it
        self._allowed: set[OpRow] = set()
        for op in self.editor.ops:
            for tensor, spec in _list_operands(op):
                storage = self.editor.tensors[tensor]
                self._forms.setdefault(storage, spec)
                if not self._users[storage] or self._users[storage][-1] is not op:
                    self._users[storage].append(op)

    def list_named_operands(self, op: OpRow) -> list[tuple[str, int]]:
        """The operands of an op: the name of the argument, and the memory."""
        names = [name for name, count in op.signature.groups for _ in range(count)]
        return [(name, self.editor.tensors[tensor]) for name, tensor in zip(names, op.inputs, strict=True)]

    def storage(self, op: OpRow, *names: str) -> int:
        """The memory of the operand that has one of these names."""
        for name, storage in self.list_named_operands(op):
            if name in names:
                return storage
        raise TraincastError(f"{op.signature.name} has no {' or '.join(names)}; capture the step again")

    def form(self, storage: int) -> tuple[int, ...]:
        """The shape of the tensors of some memory."""
        return self._plain(self._forms[storage])

    def _plain(self, spec: TensorSpec) -> tuple[int, ...]:
        return tuple(self.values[size] for size in spec.shape)

    def allow_op(self, op: OpRow) -> None:
        """An op that is told of the new forms by its author."""
        self._allowed.add(op)

    def set_height(self, storage: int, height: int) -> None:
        """Gives memory a first dimension of this many, unless it has it."""
        if self.form(storage)[0] != height:
            self.resize(storage, lambda _: self.sizes.constant(height))

    def scale(self, storage: int, factor: Fraction) -> None:
        """Makes the first dimension this many times as large, also of what it is put together from."""
        if factor != 1:
            self._reached(storage, (*_COPIES, "aten::cat"), lambda size: self.sizes.scaled(size, factor))

    def resize(self, storage: int, change: Callable[[int], int]) -> None:
        """Gives memory another first dimension, an index of a size made from the old one, and all that it is copied
        from and to."""
        self._whole |= self._reached(storage, _COPIES, change)

    def _reached(self, storage: int, through: tuple[str, ...], change: Callable[[int], int]) -> set[int]:
        waiting, reached = [storage], set[int]()
        while waiting:
            one = waiting.pop()
            if one in self._new:
                continue
            self._new[one] = change
            reached.add(one)
            for op in self._users[one]:
                if op in self._allowed:
                    continue
                if op.signature.name not in through:
                    raise TraincastError(
                        f"what its tables are looked up with goes through {op.signature.name}, which edits cannot "
                        "follow; capture the changed model"
                    )
                waiting += [self.editor.tensors[tensor] for tensor, _ in _list_operands(op)]
        return reached

    def build(self) -> Program:
        """The program with the new forms."""
        for storage, change in self._new.items():
            form, row = self._forms[storage], self.editor.storages[storage]
            whole = self.sizes.product([change(form.shape[0]), *form.shape[1:]], times=form.itemsize)
            row.size = whole if storage in self._whole else change(row.size)
        for op in dict.fromkeys(op for storage in self._new for op in self._users[storage]):
            old = op.signature
            op.signature = replace(
                old,
                inputs=self._resize_specs(op.inputs, old.inputs),
                outputs=self._resize_specs(op.outputs, old.outputs),
            )
        return self.editor.build()

    def _resize_specs(self, tensors: tuple[int, ...], specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        made = []
        for tensor, spec in zip(tensors, specs, strict=True):
            storage = self.editor.tensors[tensor]
            change = self._new.get(storage)
            if change is None:
                made.append(spec)
                continue
            part = self._plain(spec) != self.form(storage)
            if not spec.shape or (part and storage in self._whole):
                raise TraincastError("a part of its tables or lookups is used alone; capture the changed model")
            made.append(replace(spec, shape=(change(spec.shape[0]), *spec.shape[1:])))
        return tuple(made)


def _list_operands(op: OpRow) -> list[tuple[int, TensorSpec]]:
    signature = op.signature
    return [*zip(op.inputs, signature.inputs, strict=True), *zip(op.outputs, signature.outputs, strict=True)]

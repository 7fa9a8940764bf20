"""What follows from ops that are taken out or get other sizes: what only they used, and all that copies their
results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from fractions import Fraction
from math import prod

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import Scalar, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow
from traincast.ir.sizes import SizeRef
from traincast.utils.errors import TraincastError

_OWN = (StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)
"""Memory that belongs to one parameter, when it is there before the step or changed in place. The step may also make
such memory of what others use: indices of a sparse gradient are the lookups."""

_LISTS = ("aten::_fused_", "aten::stack")


class Pruning:
    """Ops of a program that go (`gone`); `drop` takes them out."""

    def __init__(self, editor: ProgramEditor, gone: Iterable[OpRow]) -> None:
        self.editor = editor
        self.ops = [op for scope in editor.scopes for op in scope.ops]
        self.gone = set(gone)
        self.lost: set[int] = set()
        self.users: dict[int, list[OpRow]] = defaultdict(list)
        for op in self.ops:
            for tensor in set(op.inputs):
                self.users[tensor].append(op)

    def follow(self, storages: set[int], tensors: set[int], check: Callable[[OpRow], None]) -> None:
        """All that is done with `tensors`, and with what is in `storages`, goes: whole ops, or their places in lists
        of tensors; `check` rejects an op that must not go. Results of ops that go, and gradients and state that they
        work on, are followed too."""
        found = -1
        while found != len(storages) + len(tensors) + len(self.gone):
            found = len(storages) + len(tensors) + len(self.gone)
            for op in self.ops:
                reached = tensors.intersection(op.inputs) or self._touched(op) & storages
                if op in self.gone or not reached:
                    continue
                check(op)
                places = list_places(op)
                kept = [n for n, place in enumerate(places) if not self._reached(place, storages, tensors)]
                if kept:
                    storages |= self.keep_places(op, kept)
                else:
                    if len(places) == 1:
                        self._check_alone(op, storages, tensors)
                    self.gone.add(op)
                    storages |= self._own(op)
                    tensors |= {*op.outputs}

    def _check_alone(self, op: OpRow, storages: set[int], tensors: set[int]) -> None:
        """Rejects to take out an op that makes something new of what goes and of what stays."""
        own = storages | self._own(op)
        stays = {t for t in op.inputs if t not in tensors and self.editor.tensors[t] not in own}
        going = {self.editor.tensors[t] for t in op.inputs if t not in stays}
        in_place = all(self.editor.tensors[t] in going for t in op.outputs)
        if stays and op.outputs and not in_place:
            raise TraincastError(f"{op.signature.name} mixes what goes with what stays; capture the changed model")

    def _reached(self, place: tuple[int, ...], storages: set[int], tensors: set[int]) -> bool:
        return any(t in tensors or self.editor.tensors[t] in storages for t in place)

    def _touched(self, op: OpRow) -> set[int]:
        return {self.editor.tensors[t] for t in (*op.inputs, *op.outputs)}

    def _own(self, op: OpRow) -> set[int]:
        """Memory that an op made, and gradients and state among what it works on."""
        rows = self.editor.storages
        changed = {self.editor.tensors[t] for t in op.outputs} if op.signature.name.endswith("_") else set()
        kept = {s for s in self._touched(op) if rows[s].kind in _OWN and (s in changed or not rows[s].made)}
        return kept | {s for s in self._touched(op) if rows[s].alloc is op}

    def keep_places(self, op: OpRow, kept: list[int]) -> set[int]:
        """Shortens the lists of an op to these places; gives all storages at the places that went."""
        length = max(count for _, count in op.signature.groups)
        gone = {self.editor.tensors[t] for span in _find_lists(op) for n, t in enumerate(span) if n not in kept}
        self.lost |= gone
        numbers: list[int] = []
        for _, span in op.signature.spans():
            places = range(span.start, span.stop)
            numbers += [places[n] for n in kept] if len(places) == length else places
        results = kept if len(op.outputs) == length else range(len(op.outputs))
        old = op.signature
        op.signature = replace(
            old,
            inputs=tuple(old.inputs[n] for n in numbers),
            outputs=tuple(old.outputs[n] for n in results),
            groups=tuple((name, len(kept) if count == length else count) for name, count in old.groups),
        )
        op.inputs = tuple(op.inputs[n] for n in numbers)
        op.outputs = tuple(op.outputs[n] for n in results)
        return gone

    def drop_unused_ops(self) -> None:
        """Ops whose results only ops that go have used go too."""
        before = -1
        while before != len(self.gone):
            before = len(self.gone)
            for op in reversed(self.ops):
                users = [user for t in op.outputs for user in self.users[t] if user is not op]
                if op not in self.gone and users and all(user in self.gone for user in users):
                    self.gone.add(op)

    def forget_gradients(self, backward: Iterable[OpRow]) -> None:
        """Gradients that the step before left, and that are freed before an op could use them, are no more: as many of
        each size as these ops of the backward pass make."""
        used = {self.editor.tensors[t] for op in self.ops for t in (*op.inputs, *op.outputs)}
        made = [self.editor.get_storage(t).size for op in backward for t in op.outputs]
        for number, row in enumerate(self.editor.storages):
            stale = not row.made and row.kind == StorageKind.GRADIENT and number not in used
            if stale and row.size in made:
                made.remove(row.size)
                row.made = True  # memory of the step that no op uses is dropped

    def drop(self, stay: Iterable[int] = ()) -> None:
        """Takes the ops out, and memory that nothing uses any more but for that which is to `stay`; what is left must
        have all that it reads."""
        editor = self.editor
        lost = {editor.tensors[t] for op in self.ops if op in self.gone for t in (*op.inputs, *op.outputs)}
        lost = (lost | self.lost) - {*stay}
        editor.drop_ops(self.gone)
        touched: Counter[int] = Counter()
        for op in (op for scope in editor.scopes for op in scope.ops):
            for tensor in op.inputs:
                row = editor.get_storage(tensor)
                if row.made and editor.tensors[tensor] in lost and not touched[editor.tensors[tensor]]:
                    raise TraincastError(f"what its bags share with others is used by {op.signature.name}")
            touched.update(editor.tensors[t] for t in (*op.inputs, *op.outputs))
        for storage in lost - set(touched):
            editor.storages[storage].made = True  # there before the step for ops that are gone: so is it


def list_places(op: OpRow) -> list[tuple[int, ...]]:
    """The tensors at every place of the lists that an op of lists was given; of another op, all at one."""
    if not ("_foreach_" in op.signature.name or op.signature.name.startswith(_LISTS)):
        return [(*op.inputs, *op.outputs)]
    return list(zip(*_find_lists(op), strict=True))


def _find_lists(op: OpRow) -> list[tuple[int, ...]]:
    """The lists of tensors of an op that have an entry for every parameter, its results among them."""
    length = max(count for _, count in op.signature.groups)
    spans = [op.inputs[span] for _, span in op.signature.spans()]
    return [span for span in (*spans, op.outputs) if len(span) == length]


def resize_scalar_stacks(editor: ProgramEditor) -> None:
    """Gives stacks of scalars whose lists have changed the form that they have now."""
    values = editor.program.size_values
    for op in editor.ops:
        form = op.signature.outputs[0] if op.signature.name == "aten::stack" else None
        if form is None or len(form.shape) != 1 or values[form.shape[0]] == len(op.inputs):
            continue
        new = replace(form, shape=(editor.sizes.constant(len(op.inputs)),))
        op.signature = replace(op.signature, outputs=(new,))
        for user in (user for user in editor.ops if op.outputs[0] in user.inputs):
            specs = zip(user.inputs, user.signature.inputs, strict=True)
            inputs = tuple(new if tensor == op.outputs[0] else spec for tensor, spec in specs)
            user.signature = replace(user.signature, inputs=inputs)


_COPIES = ("aten::_to_copy", "aten::clone", "aten::copy_", "aten::detach", "aten::lift_fresh", "aten::alias")
"""Ops whose tensors all have one form."""
_SUMS = ("aten::add", "aten::add_")


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

    def resize_all_as_high(
        self, storage: int, height: int, around: Collection[OpRow], may_follow: Callable[[OpRow], bool]
    ) -> None:
        """Gives a table another height, and all that is as high (`high`): its gradient, the moments of an optimizer.
        `around` are the ops that look it up and their backward ops; `may_follow` tells of others whether they are
        updates."""
        form, new = self._forms[storage].shape, self.sizes.constant(height)
        made = [t for op in around for t, spec in _list_results(op) if spec.shape[1:] == form[1:] and op.forward]
        waiting, seen = [storage, *(self.editor.tensors[t] for t in made)], set[int]()
        high = dict.fromkeys(one for one in waiting if self._forms[one].shape[:1] == form[:1])
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            for op in self._users[one]:
                updates = op.signature.name in (*_COPIES, *_SUMS) or may_follow(op)
                if op in around or not (updates or one in high):
                    continue
                if not updates:
                    raise TraincastError(f"{op.signature.name} uses it too")
                specs = dict(_list_operands(op))
                for place in list_places(op):
                    mine = {self.editor.tensors[t]: specs[t].shape for t in place}
                    if one in mine:  # rows of a sparse gradient are as wide as the table, moments are as high
                        waiting += [s for s, shape in mine.items() if shape[1:] == form[1:] or shape[:1] == form[:1]]
                        high |= dict.fromkeys(s for s, shape in mine.items() if shape[:1] == form[:1])
        before = self.editor.storages[storage].size
        for one in high:
            self._check_whole(one, form[0])
            self._new[one] = lambda _: new
        self._whole |= high.keys()
        self._tell_height(around, form[0], new)
        if any(self.editor.storages[one].kind == StorageKind.GRADIENT for one in high):
            self._resize_stale_gradient(before, storage, new)

    def _check_whole(self, storage: int, first: int) -> None:
        """Memory must be as high as the table and hold nothing else."""
        form, row = self._forms[storage], self.editor.storages[storage]
        if form.shape[:1] != (first,) or self.values[row.size] != prod(self._plain(form)) * form.itemsize:
            raise TraincastError("it, its gradient or a moment is a part of larger memory")

    def _tell_height(self, around: Collection[OpRow], first: int, new: int) -> None:
        """Arguments that say how high a table is: of backward ops, and of sparse gradients that they make."""
        made = {self.editor.tensors[t] for op in around for t in op.outputs if op.forward}
        for op in dict.fromkeys((*around, *(user for one in made for user in self._users[one]))):
            told = tuple(
                (name, _replace_height(value, first, new) if name in _HEIGHTS else value)
                for name, value in op.signature.scalars
            )
            op.signature = replace(op.signature, scalars=told)

    def _resize_stale_gradient(self, before: int, table: int, new: int) -> None:
        """The gradient that the step before left, which is freed before any op uses it."""
        form = self._forms[table]
        for number, row in enumerate(self.editor.storages):
            if row.kind == StorageKind.GRADIENT and not row.made and row.size == before and not self._users[number]:
                row.size = self.sizes.product([new, *form.shape[1:]], times=form.itemsize)
                return

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


_HEIGHTS = ("num_weights", "size")
"""Arguments of backward ops and of sparse tensors that begin with the height of a table."""


def _replace_height(value: Scalar, first: int, new: int) -> Scalar:
    if isinstance(value, tuple):
        return (_replace_height(value[0], first, new), *value[1:]) if value else value
    return SizeRef(new) if isinstance(value, SizeRef) and int(value) == first else value


def _list_results(op: OpRow) -> list[tuple[int, TensorSpec]]:
    return list(zip(op.outputs, op.signature.outputs, strict=True))


def _list_operands(op: OpRow) -> list[tuple[int, TensorSpec]]:
    return [*zip(op.inputs, op.signature.inputs, strict=True), *_list_results(op)]

"""What goes with ops that are taken out: what only they used, and what was only done with their results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import StorageKind
from traincast.ir.rows import OpRow
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
                places = self._list_places(op)
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

    def _list_places(self, op: OpRow) -> list[tuple[int, ...]]:
        """The tensors at every place of the lists that an op of lists was given; of another op, all at one."""
        if not ("_foreach_" in op.signature.name or op.signature.name.startswith(_LISTS)):
            return [(*op.inputs, *op.outputs)]
        return list(zip(*self.lists(op), strict=True))

    def lists(self, op: OpRow) -> list[tuple[int, ...]]:
        """The lists of tensors of an op that have an entry for every parameter, its results among them."""
        length = max(count for _, count in op.signature.groups)
        spans = [op.inputs[span] for _, span in op.signature.spans()]
        return [span for span in (*spans, op.outputs) if len(span) == length]

    def keep_places(self, op: OpRow, kept: list[int]) -> set[int]:
        """Shortens the lists of an op to these places; gives all storages at the places that went."""
        length = max(count for _, count in op.signature.groups)
        gone = {self.editor.tensors[t] for span in self.lists(op) for n, t in enumerate(span) if n not in kept}
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

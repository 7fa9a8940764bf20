"""Embedding tables of a captured step, each looked up by ops of its own: found, taken out, added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import ACCUMULATE_GRAD, Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.sizes import SizeRef
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.transforms.bags import FORWARD
from traincast.transforms.pruning import Pruning, Resizing, resize_scalar_stacks
from traincast.utils.errors import TraincastError

LOOKUPS = (*FORWARD, "aten::embedding")
_SHOWN = 12
_UPDATES = (Phase.OPTIMIZER, Phase.OTHER)
DROPPED = "what {} gave is a constant from then on, so that no layer changes its width"


@dataclass(eq=False, slots=True)
class StepTable:
    """A table: its memory, the ops that look it up, and what those are called by the module around them."""

    storage: int
    weight: TensorSpec
    module: str
    lookups: list[OpRow] = field(default_factory=list)


def find_tables(editor: ProgramEditor, program: Program) -> list[StepTable]:
    """Tables in the order in which the step first looks them up."""
    found: dict[int, StepTable] = {}
    for op in editor.ops:
        if op.signature.name in LOOKUPS:
            storage = editor.tensors[op.inputs[0]]
            module = program.names[op.module]
            table = found.setdefault(storage, StepTable(storage, op.signature.inputs[0], module))
            table.lookups.append(op)
    return list(found.values())


def check_step(step: Workload) -> None:
    """Rejects a step whose tables cannot be told apart from what else it does."""
    if len(step.ranks) > 1:
        raise TraincastError(
            f"'{step.name}' runs on {len(step.ranks)} GPUs; change the tables of its step on one GPU, and give `gpus`"
        )
    check_follows_tensors(step)


def check_tables(step: Workload) -> None:
    """Rejects a step in which no op looks up a table of its own."""
    if not {signature.name for signature in step.programs[0].symbolic} & set(LOOKUPS):
        raise make_no_tables_error(step)


def make_no_tables_error(step: Workload) -> TraincastError:
    """Why a step without embedding tables has none to change."""
    return TraincastError(f"'{step.name}' has no tables; describe the model in YAML, or capture the changed one")


def pick_table(text: str, names: Sequence[str], forms: Sequence[str]) -> int:
    """The table of a number from 0, or of the end of its name; `forms` are shown where it is none of them."""
    name = text.strip()
    alike = [number for number, path in enumerate(names) if path == name or path.endswith(f".{name}")]
    if name.isascii() and name.isdecimal() and len(name) <= 9:
        alike = [int(name)] if int(name) < len(names) else []
    if len(alike) == 1:
        return alike[0]
    shown = [f"{n}: {path or 'no module'} ({form})" for n, (path, form) in enumerate(zip(names, forms, strict=True))]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise TraincastError(f"no single table is called {name[:80]!r}; its tables are {', '.join(shown[:_SHOWN])}{more}")


def drop_own_tables(step: Workload, texts: Sequence[str]) -> tuple[Workload, str]:
    """The step without some tables: no lookups, gradients and updates of theirs. What a lookup gave is there before
    the step."""
    check_tables(step)
    program = step.programs[0]
    editor = ProgramEditor(program)
    tables = find_tables(editor, program)
    values, names = program.size_values, [table.module for table in tables]
    forms = [" x ".join(str(values[size]) for size in table.weight.shape) for table in tables]
    gone = [tables[n] for n in dict.fromkeys(pick_table(text, names, forms) for text in texts)]
    if len(gone) == len(tables):
        raise TraincastError(f"'{step.name}' has {len(tables)} tables, and one of them must stay")
    pruning = Pruning(editor, (op for table in gone for op in find_ops_around(table, editor)))
    for table in gone:
        follow_table(pruning, table)
        for lookup in table.lookups:
            result = editor.get_storage(lookup.outputs[0])
            result.made, result.lasts, result.kind = False, True, int(StorageKind.BUFFER)
    pruning.drop_unused_ops()
    results = {editor.tensors[lookup.outputs[0]] for table in gone for lookup in table.lookups}
    pruning.drop(stay=results)
    resize_scalar_stacks(editor)
    notes = " and ".join(table.module or "the table" for table in gone)
    return replace(step, programs=(editor.build(),)), DROPPED.format(notes)


def find_ops_around(table: StepTable, editor: ProgramEditor) -> list[OpRow]:
    """The lookups of a table and the ops of their backward nodes."""
    return [op for op in editor.ops if op in table.lookups or op.forward in table.lookups]


def follow_table(pruning: Pruning, table: StepTable) -> None:
    """What is done with the rows of a table and with their gradients goes too: it must be an update."""
    editor = pruning.editor
    scope_of = {op: scope for scope in editor.scopes for op in scope.ops}

    def check(op: OpRow) -> None:
        scope = scope_of[op]
        if scope.phase not in _UPDATES and scope.name != ACCUMULATE_GRAD:
            raise TraincastError(
                f"the rows of {table.module or 'its table'} or their gradients are used by {op.signature.name} too; "
                "capture the changed model"
            )

    nodes = [op for op in find_ops_around(table, editor) if op not in table.lookups]
    pruning.forget_gradients(nodes)
    given = {t for op in nodes for t in op.outputs}
    pruning.follow({table.storage} | find_counter(editor, table), given, check)


def find_counter(editor: ProgramEditor, table: StepTable) -> set[int]:
    """The number of steps that an optimizer has done, kept for every parameter in the order of their updates."""
    for scope in editor.scopes:
        if scope.phase != Phase.OPTIMIZER:
            continue
        counters, updated = _list_step_counters(scope, editor), _list_updated_parameters(scope, editor)
        if len(counters) == len(updated) and table.storage in updated:
            return {counters[updated.index(table.storage)]}
    return set()


def _list_step_counters(scope: ScopeRow, editor: ProgramEditor) -> list[int]:
    """Scalars of the optimizer's state, in order."""
    found = dict[int, None]()
    for op in scope.ops:
        if op.signature.name in ("aten::add_", "aten::_foreach_add_"):
            first = op.signature.groups[0][1]
            for tensor, spec in zip(op.inputs[:first], op.signature.inputs[:first], strict=True):
                if not spec.shape and not editor.get_storage(tensor).made:
                    found[editor.tensors[tensor]] = None
    return list(found)


def _list_updated_parameters(scope: ScopeRow, editor: ProgramEditor) -> list[int]:
    """Memory of parameters that an optimizer writes, in order."""
    found = dict[int, None]()
    for op in scope.ops:
        for tensor in op.inputs:
            if editor.get_storage(tensor).kind == StorageKind.PARAMETER:
                found[editor.tensors[tensor]] = None
    return list(found)


def resize_own_tables(step: Resizing, change: Callable[[Fraction], int]) -> int:
    """Gives tables that are looked up by ops of their own other heights; how many there are. Those that cannot be are
    named with what else uses them."""
    editor, refused = step.editor, list[str]()
    tables = find_tables(editor, step.program)
    scope_of = {op: scope for scope in editor.scopes for op in scope.ops} if tables else {}

    def is_update(op: OpRow) -> bool:
        return scope_of[op].phase in _UPDATES or scope_of[op].name == ACCUMULATE_GRAD

    for table in tables:
        form = step.form(table.storage)
        try:
            step.resize_all_as_high(table.storage, change(Fraction(form[0])), find_ops_around(table, editor), is_update)
        except TraincastError as error:
            refused.append(f"{table.module or 'a table'} ({' x '.join(map(str, form))}): {error}")
    if refused:
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise TraincastError(f"rows of {', '.join(refused[:_SHOWN])}{more}; capture the changed model")
    return len(tables)


ADDED = "the rows of the new table are added to those of {}, so that no layer changes its width"


def add_own_table(step: Workload, rows: int, lookups: int) -> tuple[Workload, str]:
    """The step with a table of this many rows, looked up so often per sample, alongside the last one that is looked up
    as often."""
    check_tables(step)
    program = step.programs[0]
    scratch = ProgramEditor(program)
    tables = find_tables(scratch, program)
    often = {
        number: _count_lookups_per_sample(program, table)
        for number, table in enumerate(tables)
        if len(table.lookups) == 1
    }
    alike = [number for number, count in often.items() if count == lookups]
    if not alike:
        known = ", ".join(f"{rows}x{count:g}" for count in sorted({*often.values()}) if count and count == int(count))
        raise TraincastError(
            f"no table of '{step.name}' is looked up {lookups} times per sample by one op; write {known}"
            if known
            else f"the tables of '{step.name}' are looked up by several ops each, or not by samples; capture the model"
        )
    adding = _Adding(program, alike[-1], rows)
    adding.rewrite()
    return replace(step, programs=(adding.editor.build(),)), ADDED.format(tables[alike[-1]].module or "another")


def _count_lookups_per_sample(program: Program, table: StepTable) -> float:
    """Lookups of a sample."""
    values = program.size_values
    count = 1
    for size in table.lookups[0].signature.inputs[1].shape:
        count *= int(values[size])
    return count / program.batch_size


class _Adding:
    """A program in which the ops of one table are repeated for another of this many rows."""

    def __init__(self, program: Program, number: int, height: int) -> None:
        self.program, self.editor = program, ProgramEditor(program)
        self.sizes, self.mine = self.editor.sizes, self._alone(program, number)
        self.table = find_tables(self.editor, program)[number]
        self.height = self.sizes.constant(height)
        self.tensors: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.copies: dict[OpRow, OpRow] = {}

    def _alone(self, program: Program, number: int) -> dict[int, set[int]]:
        """Ops, by their number, that go with the table when it is dropped, and storages at places of lists."""
        editor = ProgramEditor(program)
        table = find_tables(editor, program)[number]
        old = [_list_op_storages(op, editor) for op in editor.ops]
        pruning = Pruning(editor, find_ops_around(table, editor))
        follow_table(pruning, table)
        followed = set(pruning.gone)
        pruning.drop_unused_ops()
        # what only makes the gradient of the result serves the new table as well
        makers = {op for scope in editor.scopes if scope.phase == Phase.BACKWARD for op in scope.ops} - followed
        found: dict[int, set[int]] = {}
        for place, op in enumerate(editor.ops):
            if op in pruning.gone - makers:
                found[place] = set()
            elif shorter := old[place] - _list_op_storages(op, editor):
                found[place] = shorter
        return found

    def rewrite(self) -> None:
        """Puts the copies alongside the ops they are of: of the backward pass before them, since autograd runs the node
        of what was computed last first."""
        whole = {self.editor.ops[place] for place, shared in self.mine.items() if not shared}
        lists = {self.editor.ops[place]: shared for place, shared in self.mine.items() if shared}
        scopes: list[ScopeRow] = []
        for first, run in groupby(self.editor.scopes, lambda scope: (scope.phase, _are_all_ops_in(scope, whole))):
            held = list(run)
            twins = [ScopeRow(one.name, one.phase, one.thread, self._copies(one, whole, lists)) for one in held]
            phase, ours = first
            if not ours:
                for scope, twin in zip(held, twins, strict=True):
                    scope.ops += twin.ops
                scopes += held
            elif phase == Phase.BACKWARD:
                node = any(op.forward is self.table.lookups[0] for scope in held for op in scope.ops)
                scopes += [ScopeRow("AddBackward0", phase, held[0].thread)] if node else []
                scopes += [*twins, *held]
            else:
                scopes += [*held, *twins]
            if any(op is self.table.lookups[0] for scope in held for op in scope.ops):
                scopes.append(self._added(self.table.lookups[0], held[-1]))
        self.editor.scopes = scopes
        resize_scalar_stacks(self.editor)

    def _copies(self, scope: ScopeRow, whole: set[OpRow], lists: dict[OpRow, set[int]]) -> list[OpRow]:
        for op in scope.ops:
            if op in lists:
                self._lengthen_lists(op, lists[op])
        return [self._copy(op) for op in scope.ops if op in whole]

    def _added(self, lookup: OpRow, scope: ScopeRow) -> ScopeRow:
        """The sum of both results, which all who used the old one use."""
        old, new = lookup.outputs[0], self.tensors[lookup.outputs[0]]
        held = self.editor.get_storage(old)
        form = lookup.signature.outputs[0]
        total = self.editor.add_tensor(held.size, held.kind)
        after = self.editor.get_storage(total)
        after.free, after.lasts, held.free, held.lasts = held.free, held.lasts, None, False
        self.editor.storages[self.editor.tensors[new]].free = None
        mine = {lookup, *self.copies.values()}
        for op in self.editor.ops:
            if op not in mine:
                op.inputs = tuple(total if t == old else t for t in op.inputs)
        signature = Signature("aten::add", (form, form), (form,), (), (("self", 1), ("other", 1)), "Tensor")
        return ScopeRow("aten::add", Phase.FORWARD, scope.thread, [
            OpRow(signature, (old, new), (total,), lookup.module, lookup.stream)
        ])  # fmt: skip

    def _copy(self, op: OpRow) -> OpRow:
        forward = None if op.forward is None else self.copies.get(op.forward, op.forward)
        copy = OpRow(self._change_signature(op.signature), op.inputs, op.outputs, op.module, op.stream, forward)
        self.copies[op] = copy
        copy.inputs = tuple(self._tensor(t, op) for t in op.inputs)
        copy.outputs = tuple(self._tensor(t, op) for t in op.outputs)
        return copy

    def _lengthen_lists(self, op: OpRow, shared: set[int]) -> None:
        """One more place in the lists of an op, alongside the table's."""
        old, inputs, tensors, groups = op.signature, list[TensorSpec](), list[int](), []
        for name, span in old.spans():
            places = range(span.start, span.stop)
            ours = [n for n in places if self.editor.tensors[op.inputs[n]] in shared]
            inputs += [*old.inputs[span], *(self._spec(old.inputs[n]) for n in ours)]
            tensors += [*op.inputs[span], *(self._own(op.inputs[n]) for n in ours)]
            groups.append((name, len(places) + len(ours)))
        given = [n for n, t in enumerate(op.outputs) if self.editor.tensors[t] in shared]
        op.signature = replace(
            old, inputs=tuple(inputs), groups=tuple(groups),
            outputs=(*old.outputs, *(self._spec(old.outputs[n]) for n in given)),
        )  # fmt: skip
        op.inputs, op.outputs = tuple(tensors), (*op.outputs, *(self._own(op.outputs[n]) for n in given))

    def _tensor(self, tensor: int, op: OpRow) -> int:
        """The tensor that stands for another in a copy: its own where only the table's ops use it."""
        storage = self.editor.tensors[tensor]
        if storage in self.storages or self._is_own_storage(storage, op):
            return self._own(tensor)
        return tensor

    def _is_own_storage(self, storage: int, op: OpRow) -> bool:
        row = self.editor.storages[storage]
        if storage == self.table.storage or row.alloc is op:
            return True
        users = (
            place for place, other in enumerate(self.editor.ops) if storage in _list_op_storages(other, self.editor)
        )
        return all(place in self.mine for place in users)

    def _own(self, tensor: int) -> int:
        if tensor not in self.tensors:
            storage = self.editor.tensors[tensor]
            if storage not in self.storages:
                old = self.editor.storages[storage]
                new = self.editor.add_tensor(self._bytes(storage), old.kind, made=old.made)
                self.editor.get_storage(new).lasts = old.lasts
                self.storages[storage] = self.editor.tensors[new]
            self.tensors[tensor] = self.editor.add_view(self.storages[storage])
        return self.tensors[tensor]

    def _bytes(self, storage: int) -> int:
        """The size of memory; what is as large as the table is as large as the new one."""
        size = self.editor.storages[storage].size
        values = self.program.size_values
        if values[size] != values[self.editor.storages[self.table.storage].size]:
            return size
        item = values[size] // (values[self.table.weight.shape[0]] * values[self.table.weight.shape[1]])
        return self.sizes.product([self.height, self.table.weight.shape[1]], times=int(item))

    def _change_signature(self, signature: Signature) -> Signature:
        return replace(
            signature,
            inputs=tuple(map(self._spec, signature.inputs)),
            outputs=tuple(map(self._spec, signature.outputs)),
            scalars=tuple((name, self._change_scalar(name, value)) for name, value in signature.scalars),
        )

    def _spec(self, spec: TensorSpec) -> TensorSpec:
        same = spec.shape == self.table.weight.shape
        return replace(spec, shape=(self.height, *spec.shape[1:])) if same else spec

    def _change_scalar(self, name: str, value: Scalar) -> Scalar:
        """How many rows a backward op is told that the table has."""
        old = SizeRef(self.table.weight.shape[0])
        if name == "num_weights" and value == old:
            return SizeRef(self.height)
        if name == "size" and isinstance(value, tuple) and len(value) == 2 and value[0] == old:
            return (SizeRef(self.height), value[1])
        return value


def _are_all_ops_in(scope: ScopeRow, ops: set[OpRow]) -> bool:
    return bool(scope.ops) and all(op in ops for op in scope.ops)


def _list_op_storages(op: OpRow, editor: ProgramEditor) -> set[int]:
    return {editor.tensors[t] for t in (*op.inputs, *op.outputs)}

"""Embedding tables of a captured step, each looked up by ops of its own: found, and taken out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import ACCUMULATE_GRAD, Phase, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.transforms.bags import FORWARD
from traincast.transforms.pruning import Pruning, resize_scalar_stacks
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
        raise TraincastError(f"'{step.name}' has no tables; describe the model in YAML, or capture the changed one")


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

"""Plain SGD by lists of parameters, as PyTorch 2 runs it where no gradient is sparse."""

from __future__ import annotations

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import Phase, Signature
from traincast.ir.rows import OpRow

LISTS_SINCE = 2  # the PyTorch whose optimizers work on lists by default


def update_by_lists(editor: ProgramEditor) -> None:
    """Joins the updates of single parameters that an optimizer is left with."""
    for scope in editor.scopes:
        if scope.phase != Phase.OPTIMIZER:
            continue
        single = [op for op in scope.ops if op.signature.name == "aten::add_" and len(op.inputs) == 2]
        if len(single) < 2 or len({(op.signature.scalars, op.stream) for op in single}) > 1:
            continue
        joined = _joined(single)
        scope.ops = [joined if op is single[0] else op for op in scope.ops if op not in single[1:]]
        for storage in editor.storages:  # what was held until one of them was done
            if any(storage.free is op for op in single):
                storage.free = joined


def _joined(single: list[OpRow]) -> OpRow:
    first, number = single[0], len(single)
    specs = tuple(op.signature.inputs[place] for place in (0, 1) for op in single)
    tensors = tuple(op.inputs[place] for place in (0, 1) for op in single)
    groups = (("self", number), ("other", number))
    signature = Signature("aten::_foreach_add_", specs, (), first.signature.scalars, groups, "List")
    return OpRow(signature, tensors, (), first.module, first.stream)

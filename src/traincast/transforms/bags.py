"""One embedding bag per table: found in a step of ops, with what feeds them and what becomes of their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import TensorSpec
from traincast.ir.rows import OpRow, ScopeRow
from traincast.utils.errors import TraincastError

FORWARD = ("aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::embedding_bag")
_BACKWARD = (
    "aten::_embedding_bag_backward", "aten::_embedding_bag_dense_backward", "aten::_embedding_bag_sparse_backward",
)  # fmt: skip
_SUM = 0  # PyTorch's number of the mode
_VIEWS = ("aten::select", "aten::slice", "aten::view", "aten::reshape", "aten::unbind", "aten::detach", "aten::squeeze")


@dataclass(eq=False, slots=True)
class Bag:
    """The lookup of one table and, in training, its backward op."""

    scope: ScopeRow
    op: OpRow
    backward_scope: ScopeRow | None = None
    backward: OpRow | None = None

    @property
    def weight(self) -> TensorSpec:
        """The table, its sizes symbolic."""
        return self.op.signature.inputs[0]

    def input(self, name: str) -> tuple[int, TensorSpec]:
        """The tensor that was given as this argument, and its form."""
        for group, span in self.op.signature.spans():
            if group == name and self.op.inputs[span]:
                return self.op.inputs[span.start], self.op.signature.inputs[span.start]
        raise TraincastError(f"{self.op.signature.name} without {name} cannot be fused")


def find_bags(editor: ProgramEditor, sizes: list[int]) -> list[Bag]:
    """The bags of a step, one per table, that one table-batched op could stand for."""
    bags: list[Bag] = []
    for scope in editor.scopes:
        for op in scope.ops:
            if op.signature.name in FORWARD:
                bags.append(Bag(scope, op))
            elif op.signature.name in _BACKWARD:
                _attach_backward_op(bags, scope, op)
    if len(bags) < 2:
        raise TraincastError("it has no embedding bags of two tables or more that could be fused")
    _check_bags(bags, editor, sizes)
    return bags


def _attach_backward_op(bags: list[Bag], scope: ScopeRow, op: OpRow) -> None:
    """Gives a backward op to its bag: the one it is the gradient of, or that looked the same indices up."""
    for bag in bags:
        if bag.backward is None and (op.forward is bag.op or (op.forward is None and op.inputs[1] == bag.op.inputs[1])):
            bag.backward, bag.backward_scope = op, scope
            return
    raise TraincastError("a backward op of its embedding bags belongs to none of them")


def _check_bags(bags: list[Bag], editor: ProgramEditor, sizes: list[int]) -> None:
    first = bags[0]
    for bag in bags:
        result = bag.op.signature.outputs[0]
        mode = bag.op.signature.scalar("mode")
        averaged = isinstance(mode, int) and sizes[mode] != _SUM
        if bag.op.signature.tensors("per_sample_weights") or averaged:
            raise TraincastError("its bags are weighted or averaged; the table-batched op adds rows up")
        if result.shape != first.op.signature.outputs[0].shape or bag.weight.dtype != first.weight.dtype:
            raise TraincastError("its tables differ in width, type or bags; the table-batched op takes equal ones")
    if len({editor.tensors[bag.op.inputs[0]] for bag in bags}) < len(bags):
        raise TraincastError("several of its bags look the same table up")
    if len({bag.backward is None for bag in bags}) > 1:
        raise TraincastError("some of its tables are trained and some are not")


def find_host_copies(editor: ProgramEditor, tensors: Iterable[int]) -> list[OpRow | None]:
    """The copies from the host that tensors of lookups come from; None: one is on the device before the step."""
    makers = {t: op for scope in editor.scopes for op in scope.ops for t in op.outputs}
    return [_find_host_copy(makers, tensor) for tensor in tensors]


def _find_host_copy(makers: Mapping[int, OpRow], tensor: int) -> OpRow | None:
    while True:
        op = makers.get(tensor)
        if op is None or not op.inputs:
            return None
        if op.signature.name == "aten::_to_copy" and op.signature.inputs[0].device != "cuda":
            return op
        if op.signature.name not in _VIEWS:
            raise TraincastError(f"what it looks up comes out of {op.signature.name}, which fused bags cannot follow")
        tensor = op.inputs[0]

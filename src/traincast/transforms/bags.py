"""One embedding bag per table: found in a step of ops or in a traced step, with what feeds them and reads their
results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import ACCUMULATE_GRAD, DTYPE_BYTES, Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.sizes import SizeRef
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


ARGUMENTS = (("weights", 1), ("table_offsets", 1), ("indices", 1), ("offsets", 1))
LEARNING_RATE = 0.01  # of the table-batched op; its time does not depend on it
_NODE = re.compile(r"EmbeddingBagBackward\d*$")
_UPDATES = (Phase.OPTIMIZER, Phase.OTHER)
_PLAIN = ("aten::add_", "aten::zero_", "aten::copy_", "aten::detach")


def batch_traced_bags(program: Program) -> Program:
    """The program with its bags fused; gradients and plain updates of tensors of the tables' forms go."""
    return _Traced(program).run()


class _Traced:
    def __init__(self, program: Program) -> None:
        self.editor = ProgramEditor(program)
        self.sizes = self.editor.sizes
        self.plain: list[int] = program.size_values.tolist()
        self.bags = [(scope, op) for scope in self.editor.scopes for op in scope.ops if op.signature.name in FORWARD]
        if len(self.bags) < 2:
            raise TraincastError("it has no embedding bags of two tables or more that could be fused")
        self.tables = [self._read_shape(op.signature.inputs[0]) for _, op in self.bags]
        self.lookups = [self._read_shape(op.signature.inputs[1])[0] for _, op in self.bags]
        results = {self._read_shape(op.signature.outputs[0]) for _, op in self.bags}
        kinds = {op.signature.inputs[0].dtype for _, op in self.bags}
        if len(results) > 1 or len(kinds) > 1:
            raise TraincastError("its tables differ in width, type or bags; the table-batched op takes equal ones")
        self.batch, self.dim = results.pop()

    def run(self) -> Program:
        """Puts the lookup where the first bag was, and its backward op where the last gradient was."""
        editor, gone = self.editor, {op for _, op in self.bags}
        operands = self._make_lookup_operands()
        first = self.bags[0][0]
        lookup = self._scope(
            "LookupFunction", Phase.FORWARD, first, "traincast::batched_embedding_forward", operands,
            (self._spec((self.batch, len(self.tables), self.dim), self._kind),), ARGUMENTS, self._forms(),
        )  # fmt: skip
        editor.scopes.insert(editor.scopes.index(first), lookup)
        nodes = [scope for scope in editor.scopes if _NODE.search(scope.name)]
        if nodes:
            gone |= {op for scope in nodes for op in scope.ops} | self._updates()
            grad = self._spec((self.batch, len(self.tables), self.dim), self._kind)
            backward = self._scope(
                "LookupFunctionBackward", Phase.BACKWARD, nodes[-1], "traincast::batched_embedding_backward_sgd",
                (grad, *operands), (), (("grad", 1), *ARGUMENTS), (*self._forms(), ("learning_rate", LEARNING_RATE)),
            )  # fmt: skip
            editor.scopes.insert(editor.scopes.index(nodes[-1]), backward)
        editor.drop_ops(gone)
        return editor.build()

    def _updates(self) -> set[OpRow]:
        """Ops that keep or apply gradients of tensors that have the form of a table."""
        tables, found = set(self.tables), set()
        for scope in self.editor.scopes:
            for op in scope.ops if scope.phase in _UPDATES or scope.name == ACCUMULATE_GRAD else ():
                if not any(self._read_shape(spec) in tables for spec in (*op.signature.inputs, *op.signature.outputs)):
                    continue
                if op.signature.name not in _PLAIN:
                    raise TraincastError(
                        f"its tables are updated by {op.signature.name}; the table-batched op updates by plain SGD"
                    )
                found.add(op)
        return found

    @property
    def _kind(self) -> str:
        return self.bags[0][1].signature.inputs[0].dtype

    def _make_lookup_operands(self) -> tuple[TensorSpec, ...]:
        """Weights of all tables in one, where each begins, and the lookups of all."""
        indices = self.bags[0][1].signature.inputs[1].dtype
        return (
            self._spec((sum(rows for rows, _ in self.tables), self.dim), self._kind),
            self._spec((len(self.tables),), "int64"),
            self._spec((sum(self.lookups),), indices),
            self._spec((self.batch * len(self.tables) + 1,), indices),
        )

    def _forms(self) -> tuple[tuple[str, Scalar], ...]:
        rows = tuple(self._number(rows) for rows, _ in self.tables)
        forms: list[tuple[str, Scalar]] = [("rows", rows), ("dims", len(rows) * (self._number(self.dim),))]
        if len(set(self.lookups)) > 1:
            if any(number % self.batch for number in self.lookups):
                raise TraincastError("its bags hold no integer number of lookups per sample")
            forms.append(("pooling", tuple(self._number(number // self.batch) for number in self.lookups)))
        return tuple(forms)

    def _scope(
        self, name: str, phase: Phase, near: ScopeRow, op: str, inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec], groups: tuple[tuple[str, int], ...], scalars: tuple[tuple[str, Scalar], ...],
    ) -> ScopeRow:  # fmt: skip
        signature = Signature(op, tuple(inputs), tuple(outputs), scalars, groups)
        stream = next((one.stream for one in near.ops), 0)
        module = next((one.module for one in near.ops), 0)
        row = OpRow(signature, tuple(map(self._tensor, inputs)), tuple(map(self._tensor, outputs)), module, stream)
        return ScopeRow(name, phase, near.thread, [row])

    def _tensor(self, spec: TensorSpec) -> int:
        """As in a trace, a tensor is there for its op only."""
        return self.editor.add_tensor(
            self.sizes.product(spec.shape, times=DTYPE_BYTES[spec.dtype]), StorageKind.ACTIVATION
        )

    def _spec(self, shape: tuple[int, ...], kind: str) -> TensorSpec:
        sizes = tuple(self.sizes.constant(size) for size in shape)
        strides = tuple(self.sizes.product(sizes[place + 1 :]) for place in range(len(sizes)))
        return TensorSpec(sizes, strides, kind)

    def _number(self, value: int) -> SizeRef:
        return SizeRef(self.sizes.constant(value))

    def _read_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        return tuple(self.plain[size] for size in spec.shape)

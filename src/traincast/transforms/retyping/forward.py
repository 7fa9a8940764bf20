"""The forward pass under autocast: casts in front of what wants another type, weights cast once, batch norms that cuDNN
does not take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from traincast.ir.ops import Signature, StorageKind, TensorSpec
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.sizes import SizeRef
from traincast.transforms.retyping.typing import POLICIES, SOFTMAX, WIDE, Cast, Policy, Typing, policy_of, result_type
from traincast.utils.errors import TraincastError

_FORWARD, _BACKWARD = "aten::cudnn_batch_norm", "aten::cudnn_batch_norm_backward"
_GRADIENTS = {"grad_output": "grad_out", "save_var": "save_invstd"}
_RENAMED = {"exponential_average_factor": "momentum", "epsilon": "eps"}


def _refused(signature: Signature) -> bool:
    """cuDNN takes no bfloat16, and float16 with weights in float32 only."""
    kind, weight = signature.inputs[0].dtype, signature.tensors("weight")
    return kind == "bfloat16" or (kind == "float16" and weight[0].dtype != "float32")


def native_norm(op: OpRow, typing: Typing) -> list[OpRow]:
    """Turns a batch norm that cuDNN does not take into PyTorch's own; gives what then runs before it."""
    old = op.signature
    if old.name != _FORWARD or not _refused(old):
        return []
    scalars = tuple((_RENAMED.get(name, name), value) for name, value in old.scalars)
    op.signature = replace(old, name="aten::native_batch_norm", outputs=old.outputs[:3], scalars=scalars)
    op.outputs = op.outputs[:3]
    none = typing.sizes.constant(0)
    empty = TensorSpec((none,), (typing.sizes.constant(1),), "uint8")
    options = (("size", (SizeRef(none),)), ("dtype", "uint8"), ("memory_format", None))
    signature = Signature("aten::empty", (), (empty,), options, (), "memory_format")
    reserve = typing.editor.add_tensor(none, StorageKind.ACTIVATION)
    typing.original.append(len(typing.editor.storages) - 1)
    return [OpRow(signature, (), (reserve,), op.module, op.stream)]


def native_norm_backward(scope: ScopeRow, op: OpRow) -> None:
    """The same for the gradient of one; its inputs are in another order."""
    old = op.signature
    if old.name != _BACKWARD or not _refused(old):
        return
    order = (1, 0, *range(2, len(op.inputs) - 1))  # gradient first, nothing in reserve
    arguments = [old.groups[place][0] for place in order]
    groups = tuple((_GRADIENTS.get(argument, argument), 1) for argument in arguments)
    given = len(op.outputs)
    scalars = (("train", True), ("eps", old.scalar("epsilon")), ("output_mask", tuple(n < given for n in range(3))))
    op.signature = Signature(
        "aten::native_batch_norm_backward", tuple(old.inputs[place] for place in order), old.outputs, scalars, groups
    )
    op.inputs = tuple(op.inputs[place] for place in order)
    scope.name = "NativeBatchNormBackward0"


_CONVERTS = ("aten::to", "aten::type_as")
Result = Callable[[Signature, list[str], int], str]
Found = tuple[int, TensorSpec, OpRow]
"""A tensor that is to be cast, its form, and the op that wants it."""


class Forward:
    """Scopes of a forward pass, one after the other. `casts` are those whose results an op was given, by the tensor
    that they replaced; `gives` is what ops were told to give."""

    def __init__(self, typing: Typing, low: str, *, autocast: bool) -> None:
        self.typing, self.low, self.autocast = typing, low, autocast
        self.casts: dict[OpRow, dict[int, Cast]] = {}
        self.widens: set[OpRow] = set()  # softmax that gives float32 of half inside its kernel
        self._kept: dict[int, Cast] = {}
        self._back: dict[int, Cast] = {}  # results that the script itself turns back into the type of its operands
        self.last: OpRow | None = None

    def run(self, scope: ScopeRow) -> None:
        """Gives the ops of a scope their types."""
        policy = POLICIES.get(scope.name) if self.autocast else None
        if policy is Policy.REFUSED:
            raise TraincastError(
                f"{scope.name} is rejected by autocast; train with binary_cross_entropy_with_logits, and capture that"
            )
        if scope.name in _CONVERTS and not scope.ops:
            self._convert(scope)
            return
        ops: list[OpRow] = []
        whole = policy in (Policy.LOWER, Policy.WIDER, Policy.WIDEST)
        given = _given(scope, self.typing) if whole else []
        if scope.name == "aten::einsum":  # a list is cast in its own order
            given.reverse()
        casts = self._cast(given, policy, ops) if policy is not None and whole else {}
        for op in scope.ops:
            mine = casts
            inner = policy_of(scope.name, op.signature) if self.autocast and not whole else None
            if inner in (Policy.LOWER, Policy.WIDER, Policy.WIDEST):
                mine = self._cast(_arguments(op), inner, ops)
            elif inner is Policy.RESULT:
                mine = self._told(op, ops)
            self.casts[op] = mine = {**{t: self._back[t] for t in op.inputs if t in self._back}, **mine}
            self.typing.place(op, {source: cast.result for source, cast in mine.items()}, self._result(op))
            ops += native_norm(op, self.typing)
            ops.append(op)
        scope.ops = ops
        self.last = ops[-1] if ops else self.last

    def _convert(self, scope: ScopeRow) -> None:
        """A conversion that had nothing to convert: after a softmax, which autocast widens, it is the way back."""
        softmax = self.last
        if not self.autocast or softmax is None or softmax.signature.name not in SOFTMAX:
            return
        if softmax.outputs[0] in self._back or not (self.casts[softmax] or softmax in self.widens):
            return
        cast = self.typing.cast(softmax.outputs[0], softmax.signature.outputs[0], self.low, softmax)
        self._back[softmax.outputs[0]] = cast
        scope.ops.append(cast.op)

    def end(self) -> None:
        """Autocast's block is left: copies of weights are let go."""
        for cast in self._kept.values():
            self.typing.editor.get_storage(cast.result).free = self.last
        self._kept.clear()

    def _result(self, op: OpRow) -> Result:
        """The type of what an op gives. With weights in 16 bits a script makes its constants in them too: GEMMs of
        two types do not run."""
        dtype = op.signature.scalar("dtype")
        if not self.autocast and (dtype == WIDE or not any(s.dtype == WIDE for s in op.signature.inputs)):
            op.signature = _with(op.signature, "dtype", self.low) if dtype == WIDE else op.signature
            return lambda *_: self.low
        told = WIDE if op in self.widens else dtype
        return (lambda *_: told) if isinstance(told, str) else result_type

    def _told(self, op: OpRow, ops: list[OpRow]) -> dict[int, Cast]:
        """An op that is asked for float32: by its argument, inside its kernel, or of a cast."""
        kind = self.typing.type_of(op.inputs[0], op.signature.inputs[0])
        if op.signature.inputs[0].dtype != WIDE:
            return {}
        if op.signature.name in SOFTMAX:
            if kind == WIDE:
                return {}
            if kind != "float16":
                return self._cast(_arguments(op), Policy.WIDER, ops)
            self.widens.add(op)
            op.signature = _with(op.signature, "half_to_float", True)
            return {}
        op.signature = _with(op.signature, "dtype", WIDE)
        return {}

    def _cast(self, given: Iterable[Found], policy: Policy, ops: list[OpRow]) -> dict[int, Cast]:
        """Casts the last argument first: that is the order in which PyTorch's compiler evaluates them."""
        found = list(given)
        kinds = [self.low if t in self._back else self.typing.type_of(t, spec) for t, spec, _ in found]
        wanted = {Policy.LOWER: self.low, Policy.WIDER: WIDE}.get(policy, WIDE if WIDE in kinds else self.low)
        casts: dict[int, Cast] = {}
        for (tensor, spec, near), kind in zip(reversed(found), reversed(kinds), strict=True):
            if kind == wanted or tensor in casts:
                continue
            storage = self.typing.editor.tensors[tensor]
            parameter = self.typing.editor.storages[storage].kind == StorageKind.PARAMETER
            if parameter and storage in self._kept:
                casts[tensor] = self._kept[storage]
                continue
            casts[tensor] = self.typing.cast(tensor, spec, wanted, near)
            ops.append(casts[tensor].op)
            if parameter and wanted == self.low:
                casts[tensor].kept = True
                self._kept[storage] = casts[tensor]
        return casts


def _with(signature: Signature, name: str, value: str | bool) -> Signature:
    return replace(signature, scalars=tuple((key, value if key == name else old) for key, old in signature.scalars))


def _arguments(op: OpRow) -> list[Found]:
    """The tensors of an op that autocast looks at, in the order of its arguments."""
    return [(t, spec, op) for t, spec in zip(op.inputs, op.signature.inputs, strict=True)
            if spec.dtype == WIDE and spec.device == "cuda"]  # fmt: skip


def _given(scope: ScopeRow, typing: Typing) -> list[Found]:
    """What comes into a scope from outside, in the order of the arguments of the op that a script called."""
    inside: dict[int, int] = {}  # a tensor made here: the one from outside that it is a view or a copy of
    place: dict[int, tuple[tuple[int, int], TensorSpec, OpRow]] = {}
    for number, op in enumerate(scope.ops):
        view = len(op.inputs) == 1 and len(op.outputs) == 1 and op.signature.name not in POLICIES
        for position, (tensor, spec) in enumerate(zip(op.inputs, op.signature.inputs, strict=True)):
            root = inside.get(tensor, tensor)
            if root == -1 or spec.dtype != WIDE or spec.device != "cuda":
                continue
            late = scope.name == "aten::linear" and op.signature.name == "aten::addmm" and position == 0
            rank = (1 << 20 if view else number, 9 if late else position)
            known = place.get(root)
            if known is None:
                place[root] = (rank, spec, op)
            elif rank < known[0]:
                place[root] = (rank, known[1], known[2])
        for tensor in op.outputs:
            if tensor not in op.inputs:
                inside[tensor] = inside.get(op.inputs[0], op.inputs[0]) if view else -1
    return [(root, spec, op) for root, (_, spec, op) in sorted(place.items(), key=lambda item: item[1][0])]

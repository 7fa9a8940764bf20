"""The backward pass of a step whose forward pass was given other types: gradients of casts are casts back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from traincast.ir.ops import Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.rows import OpRow, ScopeRow
from traincast.transforms.retyping.forward import Forward
from traincast.transforms.retyping.nodes import Node, Nodes, Step
from traincast.transforms.retyping.norms import native_norm_backward
from traincast.transforms.retyping.policies import WIDE, result_type
from traincast.transforms.retyping.typing import Cast, Typing


@dataclass(eq=False, slots=True)
class _Waiting:
    """The node of a cast of the forward pass: it runs when its turn comes, and then what waited for its result."""

    place: int
    back: Cast
    sums: list[tuple[int, OpRow]] = field(default_factory=list)
    accumulate: list[Node] = field(default_factory=list)


class Backward:
    """One backward pass; `run` gives its scopes in the order of the engine."""

    def __init__(self, typing: Typing, forward: Forward, scopes: Sequence[ScopeRow], ran: Sequence[OpRow]) -> None:
        self.typing, self.forward = typing, forward
        self.nodes = Nodes(scopes, ran)
        self.thread = max((scope.thread for scope in scopes), default=0)
        self.swaps: dict[tuple[OpRow, int], int] = {}  # by op and tensor: what the op is given instead
        self.renamed: dict[int, int] = {}
        self.later: dict[int, list[OpRow]] = {}  # casts that a node makes of its results
        self.handed: dict[int, list[OpRow]] = {}  # and of what it hands on
        self.summed: dict[OpRow, OpRow] = {}  # by sum: the op that made the tensor whose gradient it is
        self.waiting: list[_Waiting] = []
        self.done: list[ScopeRow] = []

    def run(self) -> list[ScopeRow]:
        """The scopes with their types and casts."""
        for number, node in enumerate(self.nodes.nodes):
            if node.accumulates:
                holder = next((w for w in self.waiting if self._reads(node, w)), None)
                if holder is not None:
                    holder.accumulate.append(node)
                    continue
            elif node.op is not None:
                self._turn(node.place)
            self._compute(number, node)
        self._turn(-1)
        return self.done

    def _reads(self, node: Node, waiting: _Waiting) -> bool:
        """Whether a node keeps the result of a cast, or of a sum that waits for one."""
        sums = {tensor for _, op in waiting.sums for tensor in op.outputs}
        return any(
            tensor in sums or self.swaps.get((op, tensor)) == waiting.back.result
            for op in node.scope.ops
            for tensor in op.inputs
        )

    def _turn(self, place: int) -> None:
        """Runs the nodes of casts that come before a place."""
        for waiting in sorted(self.waiting, key=lambda one: -one.place):
            if waiting.place <= place:
                continue
            self.waiting.remove(waiting)
            scope = ScopeRow("ToCopyBackward0", Phase.BACKWARD, self.thread, [waiting.back.op])
            for number, op in waiting.sums:
                scope.ops.append(op)
                self._add(number, op)
            self.done.append(scope)
            for node in waiting.accumulate:
                if not waiting.sums:
                    self._take_over(waiting.back)
                for op in node.scope.ops:
                    self._place(op)
                self.done.append(node.scope)

    def _take_over(self, back: Cast) -> None:
        """The cast is the gradient that stays, and what it was made of no longer is."""
        editor = self.typing.editor
        old, new = editor.get_storage(back.source), editor.get_storage(back.result)
        if old.kind != StorageKind.GRADIENT:
            return
        new.kind, new.lasts, new.free = old.kind, old.lasts, old.free
        old.kind, old.lasts, old.free = int(StorageKind.ACTIVATION), False, None
        for tensor in self.typing.aliases.get(editor.tensors[back.source], ()):
            editor.tensors[tensor] = editor.tensors[back.result]

    def _compute(self, number: int, node: Node) -> None:
        scope = node.scope
        own = [op for op in scope.ops if not self.nodes.is_sum(op)]
        sums = [op for op in scope.ops if self.nodes.is_sum(op)]
        for op in own:
            self._place(op)
            native_norm_backward(scope, op)
        written = {tensor: op for op in own for tensor in op.outputs if self.nodes.maker.get(tensor) == number}
        for tensor, op in written.items():
            self._hand_on(number, node.op, tensor, op)
        scope.ops = [*self.handed.pop(number, []), *own, *self.later.pop(number, [])]
        for op in sums:
            late = [w for w in self.waiting for t in op.inputs if self.swaps.get((op, t)) == w.back.result]
            if late:
                min(late, key=lambda one: one.place).sums.append((number, op))
            else:
                scope.ops.append(op)
                self._add(number, op)
        self.done.append(scope)

    def _add(self, number: int, op: OpRow) -> None:
        """A sum of gradients, which then is handed on by the op that made the tensor whose gradient it is."""
        total = op.outputs[0]
        self._place(op)
        maker = self.summed.get(op)
        if maker is not None:
            self._hand_on(self.nodes.number.get(maker, number), maker, total, op)

    def _place(self, op: OpRow) -> None:
        given: dict[int, int] = {}
        casts = {} if op.forward is None else self.forward.casts.get(op.forward, {})
        for tensor in op.inputs:
            if (op, tensor) in self.swaps:
                given[tensor] = self.swaps[op, tensor]
            elif tensor in self.renamed:
                given[tensor] = self.renamed[tensor]
            elif tensor in casts and tensor not in self.nodes.maker:
                given[tensor] = casts[tensor].result
        first = op.inputs[0] if op.inputs else -1
        if op.signature.name in ("aten::add", "aten::add_") and (op, first) in self.swaps:
            self.renamed[op.outputs[0]] = given[first]
            op.signature = replace(op.signature, name="aten::add_", outputs=op.signature.inputs[:1])
            op.outputs = op.inputs[:1]  # memory that is nobody else's
        widened = op.forward is not None and op.forward in self.forward.widens
        self.typing.place(op, given, (lambda *_: self.forward.low) if widened else result_type)
        op.signature = _update_arguments(op.signature)

    def _hand_on(self, number: int, start: OpRow | None, tensor: int, op: OpRow) -> None:
        """Casts a gradient for those who read it in another type: where the forward pass cast, or where an op was given
        several types."""
        made: dict[tuple[int, str, OpRow | None], int] = {}
        for reader, user in self.nodes.readers(tensor, op):
            sums = self.nodes.is_sum(user)
            end = self.nodes.end(reader, user)
            if start is None or end is None or (end == number and not sums):
                continue
            steps = self.nodes.path(start, end, op.signature.outputs[op.outputs.index(self._now(tensor))])
            if sums:
                shared = next((n for n, one in enumerate(steps) if self.nodes.times_read[one.tensor] > 1), None)
                steps = [] if shared is None else steps[: shared + 1]
                if steps and steps[-1].maker is not None:
                    self.summed[user] = steps[-1].maker
            now = self._cast_along(steps, number, self._now(tensor), op, made)
            if now != self._now(tensor):
                self.swaps[user, tensor] = now

    def _now(self, tensor: int) -> int:
        return self.renamed.get(tensor, tensor)

    def _cast_along(
        self, steps: list[Step], number: int, tensor: int, op: OpRow, made: dict[tuple[int, str, OpRow | None], int]
    ) -> int:
        """The gradient after this many steps; casts that several readers share are made once."""
        spec = op.signature.outputs[op.outputs.index(tensor)]
        where, first = number, True
        for step in steps:
            kind = step.spec.dtype
            explicit = step.op.signature.name == "aten::_to_copy"
            if kind != spec.dtype and kind in (WIDE, self.forward.low) and spec.dtype in (WIDE, self.forward.low):
                key = (tensor, kind, step.op if explicit else None)
                if key not in made:
                    made[key] = self._cast_back(step, tensor, spec, op, where, handed=not first)
                tensor = made[key]
                spec = self.typing.forms[tensor]
            maker = step.maker
            if maker is not None and maker in self.nodes.number:
                where, first = self.nodes.number[maker], False
        return tensor

    def _cast_back(self, step: Step, tensor: int, spec: TensorSpec, op: OpRow, where: int, *, handed: bool) -> int:
        explicit = step.op.signature.name == "aten::_to_copy"
        back = self.typing.cast(tensor, spec, step.spec.dtype, step.op if explicit else op)
        back.op.forward = step.op if explicit else op.forward
        old, new = self.typing.editor.get_storage(tensor), self.typing.editor.get_storage(back.result)
        if old.made and not old.lasts:  # it is the cast that is held until then
            new.free, old.free = old.free, None
        if explicit:
            self.waiting.append(_Waiting(self.nodes.place[step.op], back))
        else:
            (self.handed if handed else self.later).setdefault(where, []).append(back.op)
        return back.result


def _update_arguments(signature: Signature) -> Signature:
    """Types that ops of the engine are told follow what they give."""

    def told(name: str, value: Scalar) -> Scalar:
        follows = name in ("dtype", "input_dtype") and value == WIDE and signature.outputs
        return signature.outputs[0].dtype if follows else value

    if not any(value == WIDE for _, value in signature.scalars):
        return signature
    return replace(signature, scalars=tuple((name, told(name, value)) for name, value in signature.scalars))

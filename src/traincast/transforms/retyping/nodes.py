"""Nodes of autograd in a backward pass: which forward op each belongs to, and in which order the engine runs them."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from traincast.ir.ops import ACCUMULATE_GRAD, TensorSpec
from traincast.ir.rows import OpRow, ScopeRow

_SUMS = ("aten::add", "aten::add_")


@dataclass(eq=False, slots=True)
class Node:
    """A scope of the backward pass. `op` is the forward op whose gradient it computes (None: unknown) and `place` where
    that ran: the engine takes the node with the highest first, but gradients of parameters at once."""

    scope: ScopeRow
    op: OpRow | None
    place: int

    @property
    def accumulates(self) -> bool:
        """Whether it keeps the gradient of a parameter."""
        return self.scope.name == ACCUMULATE_GRAD


@dataclass(frozen=True, slots=True)
class Step:
    """One step back through the forward pass: `op` read `tensor`, of this form, which `maker` had made (None: it was
    there before)."""

    op: OpRow
    tensor: int
    spec: TensorSpec
    maker: OpRow | None


class Nodes:
    """The nodes of one backward pass, with who makes and who reads a gradient; `ran` are the ops before it."""

    def __init__(self, scopes: Sequence[ScopeRow], ran: Sequence[OpRow]) -> None:
        self.ran = ran
        self.place = {op: number for number, op in enumerate(ran)}
        self.nodes = [self._linked(scope) for scope in scopes]
        self._link_empty()
        self.number = {node.op: n for n, node in enumerate(self.nodes) if node.op is not None}
        self.steps, self.times_read = _steps(ran)
        self.kept: set[OpRow] = set()  # ops that keep gradients of parameters
        self.maker: dict[int, int] = {}
        self.order: dict[OpRow, int] = {}
        self.uses: dict[int, list[tuple[int, OpRow]]] = {}
        for number, scope in enumerate(scopes):
            for op in scope.ops:
                self.order[op] = len(self.order)
                if scope.name == ACCUMULATE_GRAD:
                    self.kept.add(op)
                for tensor in dict.fromkeys(op.inputs):
                    self.uses.setdefault(tensor, []).append((number, op))
                for tensor in op.outputs:
                    self.maker.setdefault(tensor, number)

    def is_sum(self, op: OpRow) -> bool:
        """Whether an op adds two gradients of one tensor up."""
        adds = op.signature.name in _SUMS and len(op.inputs) == 2 and op not in self.kept
        return adds and all(t in self.maker for t in op.inputs)

    def readers(self, tensor: int, after: OpRow) -> list[tuple[int, OpRow]]:
        """Nodes and ops that read a gradient after an op wrote it, up to the one that writes it again."""
        found = []
        for number, op in self.uses.get(tensor, []):
            if self.order[op] > self.order[after]:
                found.append((number, op))
                if tensor in op.outputs:
                    break
        return found

    def end(self, number: int, user: OpRow) -> int | None:
        """The node that gets a gradient in the end, sums aside."""
        while self.is_sum(user):
            following = self.readers(user.outputs[0], user)
            if not following:
                return None
            number, user = following[-1]
        return number

    def path(self, start: OpRow, end: int, spec: TensorSpec) -> list[Step]:
        """The way that a gradient takes from the op whose node made it to the one whose node reads it, or to the
        parameter; empty: unknown. On it are casts, and ops whose nodes hand gradients on as they are."""
        last, begin = self.nodes[end], self.number.get(start, -1)
        came: dict[OpRow, tuple[OpRow, Step] | None] = {start: None}
        queue = deque([start])
        while queue:
            op = queue.popleft()
            for step in self.steps.get(op, ()):
                if (step.maker is None and last.accumulates and step.spec.shape == spec.shape) or (
                    step.maker is not None and step.maker is last.op
                ):
                    return _walked(came, op, step)
                maker = step.maker
                if maker is None or maker in came:
                    continue
                hands_on = begin < self.number.get(maker, -1) < end
                if hands_on or maker.signature.name == "aten::_to_copy":
                    came[maker] = (op, step)
                    queue.append(maker)
        return []

    def _linked(self, scope: ScopeRow) -> Node:
        forward = [op.forward for op in scope.ops if op.forward is not None and op.forward in self.place]
        op = max(forward, key=lambda op: self.place[op], default=None)
        return Node(scope, op, -1 if op is None else self.place[op])

    def _link_empty(self) -> None:
        """A node without ops hands its gradient on: it belongs to the op of its name between its neighbours' ops."""
        limits, above = [], len(self.ran)
        for node in self.nodes:
            limits.append(above)
            above = above if node.op is None else node.place
        below = -1
        for node, above in zip(reversed(self.nodes), reversed(limits), strict=True):
            if node.op is None and not node.scope.ops and not node.accumulates:
                name = re.sub(r"Backward\d*$", "", node.scope.name).lower()
                found = next((n for n in range(below + 1, above) if _plain(self.ran[n]) == name), None)
                if found is not None:
                    node.op, node.place = self.ran[found], found
            if node.op is not None:
                below = max(below, node.place)


def _steps(ran: Sequence[OpRow]) -> tuple[dict[OpRow, list[Step]], Counter[int]]:
    writer: dict[int, OpRow] = {}
    steps: dict[OpRow, list[Step]] = {}
    read: Counter[int] = Counter()
    for op in ran:
        steps[op] = [Step(op, tensor, spec, writer.get(tensor))
                         for tensor, spec in zip(op.inputs, op.signature.inputs, strict=True)]  # fmt: skip
        read.update(op.inputs)
        for tensor in op.outputs:
            writer[tensor] = op
    return steps, read


def _walked(came: dict[OpRow, tuple[OpRow, Step] | None], op: OpRow, last: Step) -> list[Step]:
    path = [last]
    while (before := came[op]) is not None:
        op, step = before
        path.append(step)
    return path[::-1]


def _plain(op: OpRow) -> str:
    return op.signature.name.partition("::")[2].replace("_", "")

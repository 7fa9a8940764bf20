"""A captured step under autocast, or with weights of 16 bits: the backward pass in the engine's order, gradients of
casts as casts back."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from traincast.ir.ops import ACCUMULATE_GRAD, Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.transforms.retyping.forward import Forward, native_norm_backward
from traincast.transforms.retyping.typing import WIDE, Cast, Typing, result_type
from traincast.utils.errors import TraincastError

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
                    return _trace_back(came, op, step)
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


def _trace_back(came: dict[OpRow, tuple[OpRow, Step] | None], op: OpRow, last: Step) -> list[Step]:
    path = [last]
    while (before := came[op]) is not None:
        op, step = before
        path.append(step)
    return path[::-1]


def _plain(op: OpRow) -> str:
    return op.signature.name.partition("::")[2].replace("_", "")


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


_NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def with_autocast(step: Workload, low: str) -> tuple[Workload, str]:
    """The step with its forward pass and loss under `torch.autocast` to a 16-bit type (float16, bfloat16)."""
    _check(step, low)
    programs = tuple(_retyped(program, low, autocast=True) for program in step.programs)
    scaled = " (without the scaling of a loss)" if low == "float16" and step.mode == "training" else ""
    notes = f"forward pass and loss run under autocast to {low}{scaled}; weights and optimizer stay {WIDE}"
    return replace(step, programs=programs), notes


def with_weights(step: Workload, low: str) -> tuple[Workload, str]:
    """The step of the model after `model.to(low)`: weights, gradients, state of the optimizer and inputs in 16 bits."""
    _check(step, low)
    programs = tuple(_retyped(program, low, autocast=False) for program in step.programs)
    return replace(step, programs=programs), f"weights, activations, gradients, optimizer and inputs are {low}"


def _check(step: Workload, low: str) -> None:
    check_follows_tensors(step)
    kinds = {spec.dtype for p in step.programs for s in p.symbolic for spec in s.outputs}
    if kinds & set(_NARROW):
        raise TraincastError(f"'{step.name}' computes in 16 bits already; capture it in {WIDE} to have it in {low}")
    if "compiled" in step.meta:
        raise TraincastError(f"'{step.name}' is compiled already; edit the step before it is compiled")
    if len(step.ranks) > 1:
        raise TraincastError(f"'{step.name}' runs on {len(step.ranks)} GPUs; edit its step on one GPU")


def _retyped(program: Program, low: str, *, autocast: bool) -> Program:
    typing = Typing(program)
    if not autocast:
        typing.narrow_all(low)
    forward = Forward(typing, low, autocast=autocast)
    ran: list[OpRow] = []
    scopes: list[ScopeRow] = []
    for backward, part in _passes(typing.editor.scopes):
        if backward:
            forward.end()
            done = Backward(typing, forward, part, ran).run()
            for scope in typing.editor.scopes:
                if scope.after is part[-1] and scope.thread != part[-1].thread:
                    scope.after = done[-1]
            scopes += done
            continue
        for scope in part:
            if scope.phase != Phase.OPTIMIZER or not autocast:
                forward.run(scope)
                ran += scope.ops
        scopes += part
    forward.end()
    typing.editor.scopes = scopes
    return typing.build()


def _passes(scopes: list[ScopeRow]) -> Iterator[tuple[bool, list[ScopeRow]]]:
    """Scopes in runs, with whether a run is a backward pass."""
    part: list[ScopeRow] = []
    for scope in scopes:
        if part and (scope.phase == Phase.BACKWARD) != (part[-1].phase == Phase.BACKWARD):
            yield part[-1].phase == Phase.BACKWARD, part
            part = []
        part.append(scope)
    if part:
        yield part[-1].phase == Phase.BACKWARD, part

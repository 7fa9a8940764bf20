"""Ops of a layer written forward, and backward in the opposite order from what each remembered: a small autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traincast.ir.compiled import LAUNCH, NODE
from traincast.ir.ops import ACCUMULATE_GRAD, DISPATCH_SCOPE, MODULE_SCOPE, TIMES, VARIANT, Phase, StorageKind
from traincast.models.layers.builder import Arguments, Communicator, Ref, Scalars, StepBuilder
from traincast.models.transformers.program.style import LayerGroups, Region, Style, begin_collective, write_collective

Gradients = Sequence[Ref | None]
Collectives = Sequence[tuple[str, float]]
"""Kinds and bytes."""
ALONE = LayerGroups()


@dataclass(slots=True)
class _Node:
    """An op that has a backward: what it was given and made, what it keeps, and how gradients pass it."""

    name: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    saved: tuple[Ref, ...]
    backward: Callable[[Gradients], Gradients]
    module: str


class Graph:
    """Writes ops with a `StepBuilder`. Storages go when neither the caller nor a node's backward still wants them.

    `weights` and `gradients` are parallel: parameters in order of use and what the optimizer reads.
    """

    def __init__(
        self,
        builder: StepBuilder,
        style: Style,
        *,
        training: bool = True,
        groups: LayerGroups = ALONE,
        split: bool = False,
    ) -> None:
        """`groups` are those that layers communicate in; `split`: gradients of weights come after all others, as
        zero-bubble schedules want them."""
        self.builder, self.style, self.training, self.groups = builder, style, training, groups
        self.module = ""
        self.interleaved = False  # with another micro-batch, module by module, so that dispatch runs beside kernels
        self.regions: dict[int, Region] = {}
        self.split = split
        self._late: list[Callable[[], None]] = []
        self._after: list[tuple[str, Callable[[], None]]] = []  # of a node, by module: what is done with its gradients
        self._pending: list[int] = []
        self._unhurried: list[int] = []
        self.weights: list[Ref] = []
        self.gradients: list[Ref] = []
        self._gradient_of: dict[int, Ref] = {}
        self._nodes: list[_Node] = []
        self._users: dict[int, int] = {}
        self._scoped = ""

    def weight(self, *shape: int, dtype: str = "", adapter: bool = False) -> Ref:
        """A parameter, there before the step, with its gradient (unless it is frozen; an `adapter` never is)."""
        ref = self.builder.add_resident_tensor(shape, StorageKind.PARAMETER, dtype or self.style.stream)
        if self.training and (adapter or not self.style.frozen):
            self.weights.append(ref)
            kind = "float32" if self.style.accumulate == "epilogue" and self.style.exact_gradients else ref.spec.dtype
            gradient = self.builder.add_resident_tensor(shape, StorageKind.GRADIENT, kind)
            self.gradients.append(gradient)
            self._gradient_of[ref.storage] = gradient
        return ref

    def given(self, *shape: int, dtype: str = "") -> Ref:
        """An activation that comes from elsewhere."""
        return self.builder.add_resident_tensor(shape, StorageKind.ACTIVATION, dtype or self.style.element)

    def cast(self, x: Ref, dtype: str) -> Ref:
        """A tensor in another type, and its gradient back in its own; itself where it is of this type."""
        if x.spec.dtype == dtype:
            return x
        result = self.copy_as(x, dtype)
        self.node("ToCopyBackward0", [x], [result], [], lambda grads: [self.copy_as(grads[0], x.spec.dtype)])
        return result

    def copy_as(self, x: Ref | None, dtype: str) -> Ref:
        """A copy in another type, without a gradient; the tensor itself where it is of this type."""
        assert x is not None
        if x.spec.dtype == dtype:
            return x
        result = self.new(*x.shape, dtype=dtype)
        self.op("aten::_to_copy", [("self", x)], [result], [("dtype", dtype)])
        return result

    def move_as(self, x: Ref, dtype: str) -> Ref:
        """As `copy_as`, of a tensor that nobody will name again."""
        result = self.copy_as(x, dtype)
        if result is not x:
            self.drop(x)
        return result

    def new(self, *shape: int, dtype: str = "", stride: Sequence[int] | None = None) -> Ref:
        """A tensor that the next op makes."""
        ref = self.builder.add_tensor(shape, dtype or self.style.element, stride=stride)
        self._users[ref.storage] = 1
        return ref

    def drop(self, *refs: Ref) -> None:
        """Says that nobody will name these tensors again."""
        for ref in refs:
            if ref.storage in self._users:
                self._users[ref.storage] -= 1
                if not self._users[ref.storage]:
                    self.builder.free_tensors(ref)

    def scope(self, name: str, phase: Phase = Phase.FORWARD) -> None:
        """Opens a host op; where a compiler or graph launches kernels together, only one per pass. A vendor's modules
        take the host time of their own Python besides."""
        if self.style.together:
            name = "CompiledFunctionBackward" if phase == Phase.BACKWARD else "CompiledFunction"
            if self._scoped == name:
                return
            self._scoped = name
        elif self.module in self.style.graphed:
            part = f"{self.module} {phase.name.lower()}"
            self.builder.open_scope(f"{NODE if self._scoped == part else LAUNCH}{part}", phase)
            self._scoped = part
            return
        elif self.groups.counts_on_host and (self.interleaved or self.module in ("experts", "router")):
            self.builder.open_scope(DISPATCH_SCOPE, phase)
        elif self.style.tuned:
            self.builder.open_scope(MODULE_SCOPE, phase)
        if not self.style.together:
            self._scoped = ""
        self.builder.open_scope(name, phase)

    def add_calls_of_experts(self, count: int, phase: Phase = Phase.FORWARD) -> bool:
        """Python of a vendor's grouped GEMM, which casts the operands of one expert after the other to eight bits."""
        if not (self.style.narrow and self.style.tuned) or self.style.together:
            return False
        self.builder.open_scope(f"{MODULE_SCOPE}{TIMES}{count}", phase)
        return True

    @property
    def op_by_op(self) -> bool:
        """Whether PyTorch runs the layers' ops one by one."""
        return not self.style.tuned and not self.style.together

    def add_host_ops(self, *names: str, phase: Phase = Phase.BACKWARD) -> None:
        """Ops, or nodes of autograd, that launch nothing and cost host time only, where PyTorch runs op by op."""
        if self.op_by_op:
            for name in names:
                self.builder.open_scope(name, phase)

    def op(
        self, name: str, arguments: Arguments, outputs: Sequence[Ref], scalars: Scalars = (), *, overload: str = ""
    ) -> None:
        """An op of the open scope."""
        self.builder.add_op(name, arguments, outputs, scalars, overload=overload, module=self.module)

    def collective(self, kind: str, group: Communicator, nbytes: float, ref: Ref) -> None:
        """A collective in the open scope that the kernels after it wait for."""
        self.settle()
        write_collective(self.builder, kind, group, nbytes, ref, exposed=not self.groups.in_graph, module=self.module)

    def begin(self, kind: str, group: Communicator, nbytes: float, ref: Ref) -> int:
        """A collective alongside the kernels that follow; gives the event of its end."""
        return begin_collective(self.builder, kind, group, nbytes, ref, module=self.module)

    def begin_until_next(self, kind: str, group: Communicator, nbytes: float, ref: Ref) -> None:
        """A collective alongside the kernels until the next one that kernels wait for, or the end of the pass."""
        self._pending.append(self.begin(kind, group, nbytes, ref))

    def _begin_to_end(self, kind: str, group: Communicator, nbytes: float, ref: Ref) -> None:
        """A collective alongside the kernels until the end of the pass."""
        self._unhurried.append(self.begin(kind, group, nbytes, ref))

    def communicated(
        self, x: Ref, group: Communicator, forward: Collectives, backward: Collectives, *, beside: bool
    ) -> Ref:
        """The same tensor after collectives, which others undo backward; `beside`: kernels of another micro-batch run
        meanwhile, so that none wait for them before the end of the pass."""
        write = self._begin_to_end if beside else self.collective
        for kind, nbytes in forward:
            write(kind, group, nbytes, x)
        result = self.builder.add_view(x, x.shape, x.spec.stride)

        def undo(grads: Gradients) -> Gradients:
            (grad,) = grads
            assert grad is not None
            for kind, nbytes in backward:
                write(kind, group, nbytes, grad)
            return [grad]

        self.node("CollectiveBackward", [x], [result], [], undo)
        return result

    def wait_for_counts(self) -> None:
        """The host waits for the compute stream, and then decides the sizes of what follows."""
        self.builder.open_scope("cudaStreamSynchronize")
        self.builder.add_op("cuda::stream_synchronize", [], [], [("event", -1), ("stream", 0)])
        self._scoped = ""

    def settle(self) -> None:
        """The compute stream waits for all that was begun until now."""
        for event in self._pending:
            self.builder.wait_for_event(event)
        self._pending.clear()

    def defer(self, write: Callable[[], None], refs: Sequence[Ref], region: Region | None) -> None:
        """Writes later: with the region's input gradient on its way, or at the end of the pass where it is `split`.
        `refs` stay until then."""
        for ref in refs:
            if ref.storage in self._users:
                self._users[ref.storage] += 1

        def finish() -> None:
            write()
            self.drop(*refs)

        if self.split:
            self._late.append(finish)
        elif region is not None:
            region.late.append(finish)
        else:
            finish()

    def write_late(self) -> int:
        """Writes the gradients of weights that were put off; gives the op they begin at."""
        first = self.builder.target.num_ops
        if self._late:
            self.scope("WeightGradients", Phase.BACKWARD)
        for write in self._late:
            write()
        self._late.clear()
        self._finish_gradients()
        return first

    def variant(self, *words: str) -> Scalars:
        """The scalar that names an implementation; none where no word is given."""
        chosen = " ".join(word for word in words if word)
        return [(VARIANT, chosen)] if chosen else []

    def fused(self, reads: Sequence[Ref], writes: Sequence[Ref]) -> None:
        """One kernel that streams what it reads and writes."""
        self.builder.add_op("inductor::fused", [("inputs", reads)], writes, module=self.module)

    def node(
        self,
        name: str,
        inputs: Sequence[Ref],
        outputs: Sequence[Ref],
        saved: Sequence[Ref],
        backward: Callable[[Gradients], Gradients],
    ) -> None:
        """Remembers how gradients pass what was just written; `saved` is kept until then."""
        if not self.training:
            return
        for ref in saved:
            if ref.storage in self._users:
                self._users[ref.storage] += 1
        self._nodes.append(_Node(name, tuple(inputs), tuple(outputs), tuple(saved), backward, self.module))

    def run_backward(self, output: Ref, gradient: Ref) -> None:
        """Writes the backward pass of everything so far, from the gradient of its result."""
        arrived: dict[int, Ref] = {output.tensor: gradient}
        for node in reversed(self._nodes):
            grads = [arrived.pop(ref.tensor, None) for ref in node.outputs]
            if not any(grads):
                continue
            self.module = node.module
            self.scope(node.name, Phase.BACKWARD)
            below = node.backward(grads)
            self._finish_gradients()
            for ref, grad in zip(node.inputs, below, strict=True):
                if grad is not None:
                    arrived[ref.tensor] = self._summed(arrived.get(ref.tensor), grad)
            remaining = {grad.storage for grad in arrived.values()}
            self.drop(*(grad for grad in grads if grad is not None and grad.storage not in remaining))
            self.drop(*node.saved)
        self._pending += self._unhurried
        self._unhurried.clear()
        self.settle()
        self._nodes.clear()

    def _summed(self, before: Ref | None, grad: Ref) -> Ref:
        """The gradient of a tensor that was used twice."""
        if before is None or before.tensor == grad.tensor:
            return grad
        self.scope("autograd::engine", Phase.BACKWARD)
        total = self.new(*grad.shape, dtype=grad.spec.dtype)
        self.op("aten::add", [("self", before), ("other", grad)], [total], [("alpha", 1)], overload="Tensor")
        self.drop(before, grad)
        return total

    def accumulate(self, weight: Ref, grad: Ref, *, cast: str = "") -> None:
        """A weight's gradient has come, and is cast to the type `cast` and accumulated by nodes of their own. A product
        that adds to an fp32 sum also reads and writes that: of one product about half of it shows, of a grouped one
        (three dimensions) all, as SimuMax's table of B200 kernels says."""
        self.builder.target.set_kind(grad.storage, StorageKind.GRADIENT)
        target = self._gradient_of.get(weight.storage)
        if target is not None and target.spec.dtype == "float32" and self.style.accumulate == "epilogue":
            shown = target if len(target.shape) > 2 else self._as_half(target)
            self.fused([shown], [shown])

        def finish() -> None:
            if cast not in ("", grad.spec.dtype):
                if self.op_by_op:
                    self.scope("ToCopyBackward0", Phase.BACKWARD)
                self.drop(self.copy_as(grad, cast))
            if target is not None and self.style.accumulate == "add":
                self.scope(ACCUMULATE_GRAD, Phase.BACKWARD)
                self.op("aten::add_", [("self", target), ("other", grad)], [target], [("alpha", 1)], overload="Tensor")
            else:
                self.add_host_ops(ACCUMULATE_GRAD)
            self.drop(grad)

        self._after.append((self.module, finish))

    def _finish_gradients(self) -> None:
        """Casts and accumulates the gradients of weights that the last node made."""
        after, self._after = self._after, []
        for module, finish in after:
            self.module = module
            finish()

    def _as_half(self, target: Ref) -> Ref:
        return self.builder.add_reinterpreted_view(target, target.shape, target.spec.stride, "bfloat16")

    def wants(self, weight: Ref) -> bool:
        """Whether this weight gets a gradient."""
        return weight.storage in self._gradient_of

"""Linear layers under DDP on a rank's tape, op for op as PyTorch 2 runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from traincast.programs.data_parallel.buckets import Bucket, assign_buckets
from traincast.programs.dlrm.layers import Layer, activation_backward, forward, layers, products_backward
from traincast.programs.sharded.tape import RankTape
from traincast.programs.tape import Ref, Scalars
from traincast.workload.ops import Phase, StorageKind, TensorSpec

BUCKET_BYTES = (1 << 20, 25 << 20)
_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


@dataclass(slots=True, eq=False)
class Reducer:
    """DDP's reducer of one module: gradients are copied into buckets as they come, and full buckets all-reduced.

    `forms` are those of the gradients in the order in which they come. With `as_views` gradients become views of their
    buckets (`gradient_as_bucket_view`): nothing is copied back.
    """

    tape: RankTape
    forms: Sequence[TensorSpec]
    as_views: bool = False
    _buckets: tuple[Bucket, ...] = field(init=False)
    _flat: list[Ref] = field(init=False)
    _before: list[Ref] = field(init=False)
    _grads: list[Ref] = field(default_factory=list)
    _events: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._buckets = assign_buckets(self.forms, BUCKET_BYTES)
        kind = StorageKind.BUFFER
        self._flat = [self.tape.resident((bucket.numel,), kind, bucket.dtype) for bucket in self._buckets]
        before = () if self.as_views else self.forms
        self._before = [self.tape.resident(form.shape, StorageKind.GRADIENT, form.dtype) for form in before]

    def drop(self) -> None:
        """The gradients of the step before go."""
        self.tape.free(*self._before)

    def accumulate(self, grad: Ref) -> Ref:
        """A gradient has come; gives the tensor that the optimizer will read."""
        tape = self.tape
        tape.scope("torch::autograd::AccumulateGrad")
        kept = tape.view(grad, grad.shape)
        tape.op("aten::detach", [("self", grad)], [kept])
        number = len(self._grads)
        bucket = next(i for i, bucket in enumerate(self._buckets) if number in bucket.members)
        slot = tape.view(self._flat[bucket], grad.shape)
        arguments = [("self", kept), ("out", slot)]
        tape.op("aten::mul", arguments, [slot], [("other", 1.0 / tape.world_size)], overload="out")
        if self.as_views:
            tape.free(grad)
            kept = slot
        else:
            tape.builder.set_kind(grad.storage, StorageKind.GRADIENT)
        self._grads.append(kept)
        if number == self._buckets[bucket].members[-1]:
            flat = tape.view(self._flat[bucket], self._flat[bucket].shape)
            self._events.append(
                tape.collective("allreduce_", "all_reduce", tape.world, [("tensors", flat)], flat,
                                nbytes=flat.spec.nbytes)
            )  # fmt: skip
        return kept

    def finish(self) -> None:
        """At the end of backward: the stream waits for each bucket, and gradients are copied back unless views."""
        tape = self.tape
        for bucket, flat, event in zip(self._buckets, self._flat, self._events, strict=True):
            tape.engine_scope("cuda::stream_wait_event", Phase.OTHER)
            tape.wait(event)
            views = []
            for number, offset in zip(bucket.members, bucket.offsets, strict=True):
                grad = self._grads[number]
                tape.engine_scope("aten::as_strided", Phase.BACKWARD)
                views.append(tape.view(flat, grad.shape))
                scalars: Scalars = [("size", grad.shape), ("stride", grad.spec.stride), ("storage_offset", offset)]
                tape.op("aten::as_strided", [("self", flat)], [views[-1]], scalars)
            if self.as_views:
                continue
            for number, view in zip(bucket.members, views, strict=True):
                tape.engine_scope(_COPY_BACK, Phase.BACKWARD)
                grad = self._grads[number]
                tape.op("aten::copy_", [("self", grad), ("src", view)], [grad], [("non_blocking", False)])


class Mlp:
    """An MLP. Its `reducer` is that of the module under DDP that it is a part of; `last` is the last activation.

    With `input_grad` backward goes on to what is below."""

    reducer: Reducer

    def __init__(
        self, tape: RankTape, name: str, widths: Sequence[int], *, last: str = "relu", input_grad: bool
    ) -> None:
        self.tape, self.input_grad = tape, input_grad
        self.layers = layers(tape, name, widths, last=last)

    def parameters(self) -> list[Ref]:
        """Weights and biases in order."""
        return [ref for layer in self.layers for ref in (layer.weight, layer.bias)]

    def grads(self) -> list[Ref]:
        """Their gradients, once backward has run."""
        return [ref for layer in self.layers for ref in (layer.weight_grad, layer.bias_grad) if ref is not None]

    def arriving(self) -> list[TensorSpec]:
        """Forms of the gradients in the order in which they come; those that are cast, last cast first."""
        pairs = [(layer.bias, layer.weight) for layer in reversed(self.layers)]
        return [ref.spec for pair in pairs for ref in (reversed(pair) if self.tape.half else pair)]

    def leave_autocast(self) -> None:
        """Lets go of casts that only autocast's cache still holds: biases, and a weight that passes no gradient on."""
        held = [layer.cast_bias for layer in self.layers]
        first = self.layers[0]
        if not self.input_grad and first.casts[1] >= 0:
            held.append(first.transposed)
        self.tape.free(*(ref for ref in held if ref is not None))

    def forward(self, x: Ref) -> Ref:
        """Runs the layers."""
        return forward(self.tape, self.layers, x, keep=True)

    def backward(self, grad: Ref) -> Ref:
        """From the gradient of the result to that of the input (if wanted), reducing as gradients come."""
        first = self.layers[0]
        for layer in reversed(self.layers):
            inner = self._activation_backward(layer, grad) if layer.activation else grad
            grad = self._linear_backward(layer, inner, input_grad=self.input_grad or layer is not first)
        return grad

    def _activation_backward(self, layer: Layer, grad: Ref) -> Ref:
        assert layer.result is not None
        saved = self.tape.view(layer.result, layer.result.shape)
        inner = activation_backward(self.tape, layer, grad, saved)
        self.tape.free(layer.result)
        return inner

    def _linear_backward(self, layer: Layer, grad: Ref, *, input_grad: bool) -> Ref:
        assert layer.transposed is not None and layer.given is not None
        tape = self.tape
        t, addmm, _ = layer.ops
        fan_out, fan_in = layer.weight.shape
        op = partial(tape.op, module=layer.module, forward=addmm)
        tape.scope("AddmmBackward0", Phase.BACKWARD)
        below, weight_grad, turned = products_backward(
            tape, op, layer.transposed, layer.given, grad, input_grad=input_grad
        )
        summed = tape.new((1, fan_out), grad.spec.dtype)
        scalars: Scalars = [("dim", (0,)), ("keepdim", True), ("dtype", None)]
        op("aten::sum", [("self", grad)], [summed], scalars, overload="dim_IntList")
        bias_grad = tape.view(summed, (fan_out,))
        op("aten::view", [("self", summed)], [bias_grad], [("size", (fan_out,))])
        bias_cast, weight_cast, given_cast = layer.casts
        # the loop holds the input that needs no gradient; an activation's own backward still needs its result
        tape.free(grad, *([layer.given] if input_grad or given_cast >= 0 else []))
        if weight_cast < 0:
            layer.bias_grad = self.reducer.accumulate(bias_grad)
        elif input_grad:
            tape.free(layer.transposed)
        tape.scope("TBackward0")
        straight = tape.view(weight_grad, (fan_out, fan_in))
        tape.op("aten::t", [("self", turned)], [straight], module=layer.module, forward=t)
        if input_grad:
            below = tape.cast_backward(below, given_cast, module=layer.module)
        straight = tape.cast_backward(straight, weight_cast, module=layer.module)
        layer.weight_grad = self.reducer.accumulate(straight)
        if weight_cast >= 0:
            layer.bias_grad = self.reducer.accumulate(tape.cast_backward(bias_grad, bias_cast, module=layer.module))
        return below

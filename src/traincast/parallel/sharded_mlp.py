"""Linear layers under DDP on a rank's tape, op for op as PyTorch 2 runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from traincast.models.dlrm_layers import Layer, forward, layers, products_backward
from traincast.models.tape import Ref, Scalars
from traincast.parallel.buckets import Bucket, assign_buckets
from traincast.parallel.sharded_tape import RankTape
from traincast.workload.ops import Phase, StorageKind, TensorSpec

BUCKET_BYTES = (1 << 20, 25 << 20)
_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


@dataclass(slots=True, eq=False)
class Reducer:
    """DDP's reducer of one module: gradients are copied into buckets as they come, and full buckets all-reduced.

    `forms` are those of the gradients in the order in which they come.
    """

    tape: RankTape
    forms: Sequence[TensorSpec]
    _buckets: tuple[Bucket, ...] = field(init=False)
    _flat: list[Ref] = field(init=False)
    _grads: list[Ref] = field(default_factory=list)
    _events: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._buckets = assign_buckets(self.forms, BUCKET_BYTES)
        kind = StorageKind.BUFFER
        self._flat = [self.tape.resident((bucket.numel,), kind, bucket.dtype) for bucket in self._buckets]

    def accumulate(self, grad: Ref) -> Ref:
        """A gradient has come; gives the tensor that the optimizer will read."""
        tape = self.tape
        tape.scope("torch::autograd::AccumulateGrad")
        kept = tape.view(grad, grad.shape)
        tape.op("aten::detach", [("self", grad)], [kept])
        number = len(self._grads)
        self._grads.append(kept)
        bucket = next(i for i, bucket in enumerate(self._buckets) if number in bucket.members)
        slot = tape.view(self._flat[bucket], grad.shape)
        arguments = [("self", kept), ("out", slot)]
        tape.op("aten::mul", arguments, [slot], [("other", 1.0 / tape.world_size)], overload="out")
        if number == self._buckets[bucket].members[-1]:
            flat = tape.view(self._flat[bucket], self._flat[bucket].shape)
            self._events.append(
                tape.collective("allreduce_", "all_reduce", tape.world, [("tensors", flat)], flat,
                                nbytes=flat.spec.nbytes)
            )  # fmt: skip
        return kept

    def finish(self) -> None:
        """At the end of backward: the stream waits for each bucket, and gradients are copied back."""
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
            for number, view in zip(bucket.members, views, strict=True):
                tape.engine_scope(_COPY_BACK, Phase.BACKWARD)
                grad = self._grads[number]
                tape.op("aten::copy_", [("self", grad), ("src", view)], [grad], [("non_blocking", False)])


class Mlp:
    """An MLP under DDP."""

    def __init__(self, tape: RankTape, name: str, widths: Sequence[int], *, sigmoid_last: bool) -> None:
        self.tape = tape
        self.layers = layers(tape, name, widths, sigmoid_last=sigmoid_last, gradients=False)
        self.reducer = Reducer(
            tape, [ref.spec for layer in reversed(self.layers) for ref in (layer.bias, layer.weight)]
        )

    def parameters(self) -> list[Ref]:
        """Weights and biases in order."""
        return [ref for layer in self.layers for ref in (layer.weight, layer.bias)]

    def grads(self) -> list[Ref]:
        """Their gradients, once backward has run."""
        return [ref for layer in self.layers for ref in (layer.weight_grad, layer.bias_grad) if ref is not None]

    def forward(self, x: Ref) -> Ref:
        """Runs the layers."""
        return forward(self.tape, self.layers, x, keep=True)

    def backward(self, grad: Ref, *, input_grad: bool) -> Ref:
        """From the gradient of the result to that of the input (if wanted), reducing as gradients come."""
        tape = self.tape
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            assert layer.result is not None
            node, name, saved = (
                ("SigmoidBackward0", "aten::sigmoid_backward", "output")
                if layer.sigmoid
                else ("ReluBackward0", "aten::threshold_backward", "self")
            )
            tape.scope(node, Phase.BACKWARD)
            inner = tape.new(layer.result.shape)
            tape.op(
                name, [("grad_output", grad), (saved, tape.view(layer.result, layer.result.shape))], [inner],
                () if layer.sigmoid else [("threshold", 0)], module=layer.activation_module, forward=layer.ops[2],
            )  # fmt: skip
            tape.free(grad, layer.result)
            grad = self._linear_backward(layer, inner, input_grad=input_grad or number > 0)
        return grad

    def _linear_backward(self, layer: Layer, grad: Ref, *, input_grad: bool) -> Ref:
        assert layer.transposed is not None and layer.given is not None
        tape = self.tape
        t, addmm, _ = layer.ops
        fan_out, fan_in = layer.weight.shape
        op = partial(tape.op, module=layer.module, forward=addmm)
        tape.scope("AddmmBackward0")
        below, weight_grad, turned = products_backward(
            tape, op, layer.weight, layer.transposed, layer.given, grad, input_grad=input_grad
        )
        summed = tape.new((1, fan_out))
        scalars: Scalars = [("dim", (0,)), ("keepdim", True), ("dtype", None)]
        op("aten::sum", [("self", grad)], [summed], scalars, overload="dim_IntList")
        bias_grad = tape.view(summed, (fan_out,))
        op("aten::view", [("self", summed)], [bias_grad], [("size", (fan_out,))])
        tape.free(grad)
        kept_bias = self.reducer.accumulate(bias_grad)
        tape.scope("TBackward0")
        straight = tape.view(weight_grad, (fan_out, fan_in))
        tape.op("aten::t", [("self", turned)], [straight], module=layer.module, forward=t)
        layer.weight_grad, layer.bias_grad = self.reducer.accumulate(straight), kept_bias
        return below

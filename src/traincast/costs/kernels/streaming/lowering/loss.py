"""Loss functions: an element-wise kernel and, unless every element is wanted, a reduction."""

from __future__ import annotations

from traincast.costs.kernels.operands import read_operands
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming.launches import elementwise, fill, memcpy, reduction, small_kernel
from traincast.ir.ops import Signature, TensorSpec

_NONE, _MEAN = 0, 1  # values of ATen's `reduction`


def _reduce(signature: Signature, losses: TensorSpec) -> tuple[Item, ...]:
    """The reduction of a loss per element to its mean or sum."""
    if signature.scalar("reduction", _MEAN) == _NONE:
        return ()
    return (reduction("full", losses, signature.outputs[:1]),)


@lowers(
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::huber_loss",
    "aten::soft_margin_loss",
    "aten::l1_loss",
    "aten::kl_div",
)
def pointwise_loss(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Loss per element, then its reduction."""
    source = signature.inputs[0]
    return (elementwise("loss", read_operands(signature), (source,)), *_reduce(signature, source))


@lowers("aten::binary_cross_entropy")
def binary_cross_entropy(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """As other losses; 1.x reduces into a temporary and copies it to the result."""
    calls = pointwise_loss(signature, context)
    if context.framework_version < (2, 0) and len(calls) > 1:
        return (*calls, memcpy("d2d", signature.outputs[0].nbytes))
    return calls


@lowers("aten::binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """log-sigmoid, 1 - target, times the input, minus the log-sigmoid; weights multiply; then the reduction."""
    logits, target = signature.inputs[:2]
    one = (logits,)
    calls: list[Item] = [
        elementwise("exp", one, one),
        elementwise("add", (target,), one),
        elementwise("mul", (logits, target), one),
        elementwise("add", (logits, target), one),
    ]
    if signature.tensors("pos_weight"):
        calls += [elementwise("mul", (logits, target), one) for _ in range(3)]
    if signature.tensors("weight"):
        calls.append(elementwise("mul", (logits, target), one))
    return (*calls, *_reduce(signature, logits))


@lowers(
    "aten::mse_loss_backward",
    "aten::smooth_l1_loss_backward",
    "aten::huber_loss_backward",
    "aten::soft_margin_loss_backward",
)
def pointwise_loss_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient is zeroed, then written."""
    return (fill(signature.outputs[0]), elementwise("loss", read_operands(signature), signature.outputs))


@lowers("aten::binary_cross_entropy_backward")
def binary_cross_entropy_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient, then its division by the number of elements for a mean."""
    outputs = signature.outputs
    calls = (elementwise("loss", read_operands(signature), outputs),)
    if signature.scalar("reduction", _MEAN) != _MEAN:
        return calls
    return (*calls, elementwise("div", outputs, outputs))


@lowers("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel picks a log-probability per target and reduces."""
    target = signature.inputs[1]
    picked = TensorSpec(target.shape, target.stride, signature.inputs[0].dtype, target.device)
    return (reduction("full", picked, signature.outputs, extra_read=target.nbytes),)


@lowers("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient is zeroed, then one element per target is written."""
    target = signature.inputs[2]
    return (fill(signature.outputs[0]), small_kernel("loss", elements=target.numel, compute="fp32", item_bytes=8))

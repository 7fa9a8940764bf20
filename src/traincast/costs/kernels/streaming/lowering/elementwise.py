"""Element-wise ops: arithmetic, fills, random numbers, losses, and what a compiler fused of several."""

from __future__ import annotations

from traincast.costs.kernels.operands import get_compute_type, is_on_device, list_read_operands, make_aten_names
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming.launches import (
    make_elementwise_call,
    make_fill_kernel,
    make_iterated_call,
    make_memcpy,
    make_reduction_call,
    make_small_kernel,
)
from traincast.costs.kernels.streaming.lowering.index import make_index_call
from traincast.ir.ops import Signature, TensorSpec

# Arithmetic class -> ops. Each is known in place too.
_POINTWISE = {
    "add": """add sub rsub neg abs sign sgn clamp clamp_min clamp_max hardtanh maximum minimum fmax fmin floor ceil
        round trunc frac lerp addcmul nan_to_num bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__
        __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift relu6 _add_relu
        subtract absolute""",
    "mul": "mul square _masked_scale hardswish hardsigmoid native_dropout_backward multiply ldexp",
    "div": "div reciprocal remainder fmod floor_divide true_divide divide addcdiv",
    "pow": "pow sqrt rsqrt atan2 hypot float_power",
    "tanh": "tanh sigmoid tanh_backward sigmoid_backward sin cos tan asin acos atan sinh cosh asinh acosh atanh",
    "relu": """relu leaky_relu threshold threshold_backward leaky_relu_backward hardtanh_backward hardswish_backward
        hardsigmoid_backward prelu _prelu_kernel _prelu_kernel_backward rrelu_with_noise""",
    "gelu": """gelu gelu_backward silu silu_backward mish mish_backward erf erfc erfinv glu glu_backward
        softplus softplus_backward elu elu_backward celu selu lgamma digamma""",
    "exp": """exp exp2 expm1 log log2 log10 log1p logit logit_backward log_sigmoid_forward log_sigmoid_backward xlogy
        logaddexp logaddexp2 special_xlog1py""",
    "compare": """eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite isneginf
        isposinf where masked_fill signbit heaviside isclose tril triu""",
}
# Constant or counting fills: what they write, they write without reading.
_FILLS = """
    fill fill_ zero zero_ zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full arange linspace
    eye scalar_tensor tril_indices triu_indices hann_window hamming_window range logspace
"""
_RANDOM = """
    bernoulli_ uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_ rand rand_like randn randn_like
    randint randint_like randperm uniform normal
"""
_IGNORED = frozenset({"grad_input"})
_NONE, _MEAN = 0, 1  # values of ATen's `reduction`


def _list_kinds() -> dict[str, str]:
    table: dict[str, str] = {}
    for kind, names in _POINTWISE.items():
        for name in names.split():
            table[f"aten::{name}"] = kind
            table[f"aten::{name}_"] = kind
    return table


_KINDS = _list_kinds()


@lowers(*_KINDS)
def lower_pointwise(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; comparisons compute in the type of what they compare."""
    if _find_sparse_arguments(signature):
        return _lower_sparse(signature)
    kind = _KINDS[signature.name]
    outputs = [spec for spec in signature.outputs if is_on_device(spec) and spec.numel]
    if not outputs:
        return ()
    reads = list_read_operands(signature, *_IGNORED)
    compute = get_compute_type(reads[-1]) if kind == "compare" and reads else get_compute_type(outputs[0])
    return (make_iterated_call(kind, reads, outputs, compute=compute),)


def _find_sparse_arguments(signature: Signature) -> list[str]:
    """Names of the arguments that are sparse: each is an index and a value tensor among the inputs."""
    return [name.removesuffix("_layout") for name, value in signature.scalars if value == "sparse_coo"]


def _lower_sparse(signature: Signature) -> tuple[Item, ...]:
    """A sparse operand: scattered onto a dense one, else arithmetic on the stored values."""
    name = _find_sparse_arguments(signature)[-1]
    indices, values = signature.tensors(name)[:2]
    target = signature.inputs[0]
    if name == "self":
        return (make_elementwise_call(_KINDS[signature.name], (values,), (values,)),)
    run = values.numel // max(1, indices.shape[-1])
    return (make_index_call("scatter", values.numel, run, target.itemsize, indices.nbytes, get_compute_type(target)),)


@lowers(*make_aten_names(_FILLS))
def lower_fills(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that only writes."""
    return tuple(make_fill_kernel(spec) for spec in signature.outputs if is_on_device(spec) and spec.numel)


@lowers(*make_aten_names(_RANDOM))
def lower_random(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that draws random numbers and only writes."""
    return tuple(
        make_elementwise_call("dropout", (), (spec,)) for spec in signature.outputs if is_on_device(spec) and spec.numel
    )


@lowers("aten::native_dropout", "aten::_fused_dropout", "aten::bernoulli")
def lower_dropout(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Reads the input, draws a mask, writes the result and the mask."""
    outputs = [spec for spec in signature.outputs if is_on_device(spec)]
    return (make_elementwise_call("dropout", list_read_operands(signature), outputs),) if outputs else ()


@lowers("inductor::fused")
def lower_fused(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that streams what it reads and writes; rows it reduces stay on the chip meanwhile."""
    tensors = (*signature.inputs, *signature.outputs)
    return (
        (make_elementwise_call("add", signature.inputs, signature.outputs),)
        if any(spec.numel for spec in tensors)
        else ()
    )


def _make_loss_reduction(signature: Signature, losses: TensorSpec) -> tuple[Item, ...]:
    """The reduction of a loss per element to its mean or sum."""
    if signature.scalar("reduction", _MEAN) == _NONE:
        return ()
    return (make_reduction_call("full", losses, signature.outputs[:1]),)


@lowers(
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::huber_loss",
    "aten::soft_margin_loss",
    "aten::l1_loss",
    "aten::kl_div",
)
def lower_pointwise_loss(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Loss per element, then its reduction."""
    source = signature.inputs[0]
    return (
        make_elementwise_call("loss", list_read_operands(signature), (source,)),
        *_make_loss_reduction(signature, source),
    )


@lowers("aten::binary_cross_entropy")
def lower_binary_cross_entropy(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """As other losses; 1.x reduces into a temporary and copies it to the result."""
    calls = lower_pointwise_loss(signature, context)
    if context.framework_version < (2, 0) and len(calls) > 1:
        return (*calls, make_memcpy("d2d", signature.outputs[0].nbytes))
    return calls


@lowers("aten::binary_cross_entropy_with_logits")
def lower_binary_cross_entropy_with_logits(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """log-sigmoid, 1 - target, times the input, minus the log-sigmoid; weights multiply; then the reduction."""
    logits, target = signature.inputs[:2]
    one = (logits,)
    calls: list[Item] = [
        make_elementwise_call("exp", one, one),
        make_elementwise_call("add", (target,), one),
        make_elementwise_call("mul", (logits, target), one),
        make_elementwise_call("add", (logits, target), one),
    ]
    if signature.tensors("pos_weight"):
        calls += [make_elementwise_call("mul", (logits, target), one) for _ in range(3)]
    if signature.tensors("weight"):
        calls.append(make_elementwise_call("mul", (logits, target), one))
    return (*calls, *_make_loss_reduction(signature, logits))


@lowers(
    "aten::mse_loss_backward",
    "aten::smooth_l1_loss_backward",
    "aten::huber_loss_backward",
    "aten::soft_margin_loss_backward",
)
def lower_pointwise_loss_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient is zeroed, then written."""
    return (
        make_fill_kernel(signature.outputs[0]),
        make_elementwise_call("loss", list_read_operands(signature), signature.outputs),
    )


@lowers("aten::binary_cross_entropy_backward")
def lower_binary_cross_entropy_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient, then its division by the number of elements for a mean."""
    outputs = signature.outputs
    calls = (make_elementwise_call("loss", list_read_operands(signature), outputs),)
    if signature.scalar("reduction", _MEAN) != _MEAN:
        return calls
    return (*calls, make_elementwise_call("div", outputs, outputs))


@lowers("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def lower_nll_loss(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel picks a log-probability per target and reduces."""
    target = signature.inputs[1]
    picked = TensorSpec(target.shape, target.stride, signature.inputs[0].dtype, target.device)
    return (make_reduction_call("full", picked, signature.outputs, extra_read=target.nbytes),)


@lowers("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def lower_nll_loss_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient is zeroed, then one element per target is written."""
    target = signature.inputs[2]
    return (
        make_fill_kernel(signature.outputs[0]),
        make_small_kernel("loss", elements=target.numel, compute="fp32", item_bytes=8),
    )

"""Element-wise ops: one kernel that reads its operands and writes its result."""

from __future__ import annotations

from traincast.costs.kernels.operands import aten, compute_of, on_device, read_operands
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming.launches import elementwise, fill, iterated
from traincast.costs.kernels.streaming.lowering.index import index_call
from traincast.ir.ops import Signature

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


def _kinds() -> dict[str, str]:
    table: dict[str, str] = {}
    for kind, names in _POINTWISE.items():
        for name in names.split():
            table[f"aten::{name}"] = kind
            table[f"aten::{name}_"] = kind
    return table


_KINDS = _kinds()


@lowers(*_KINDS)
def pointwise(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; comparisons compute in the type of what they compare."""
    if _sparse_arguments(signature):
        return _sparse(signature)
    kind = _KINDS[signature.name]
    outputs = [spec for spec in signature.outputs if on_device(spec) and spec.numel]
    if not outputs:
        return ()
    reads = read_operands(signature, *_IGNORED)
    compute = compute_of(reads[-1]) if kind == "compare" and reads else compute_of(outputs[0])
    return (iterated(kind, reads, outputs, compute=compute),)


def _sparse_arguments(signature: Signature) -> list[str]:
    """Names of the arguments that are sparse: each is an index and a value tensor among the inputs."""
    return [name.removesuffix("_layout") for name, value in signature.scalars if value == "sparse_coo"]


def _sparse(signature: Signature) -> tuple[Item, ...]:
    """A sparse operand: scattered onto a dense one, else arithmetic on the stored values."""
    name = _sparse_arguments(signature)[-1]
    indices, values = signature.tensors(name)[:2]
    target = signature.inputs[0]
    if name == "self":
        return (elementwise(_KINDS[signature.name], (values,), (values,)),)
    run = values.numel // max(1, indices.shape[-1])
    return (index_call("scatter", values.numel, run, target.itemsize, indices.nbytes, compute_of(target)),)


@lowers(*aten(_FILLS))
def fills(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that only writes."""
    return tuple(fill(spec) for spec in signature.outputs if on_device(spec) and spec.numel)


@lowers(*aten(_RANDOM))
def random(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that draws random numbers and only writes."""
    return tuple(elementwise("dropout", (), (spec,)) for spec in signature.outputs if on_device(spec) and spec.numel)


@lowers("aten::native_dropout", "aten::_fused_dropout", "aten::bernoulli")
def dropout(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Reads the input, draws a mask, writes the result and the mask."""
    outputs = [spec for spec in signature.outputs if on_device(spec)]
    return (elementwise("dropout", read_operands(signature), outputs),) if outputs else ()

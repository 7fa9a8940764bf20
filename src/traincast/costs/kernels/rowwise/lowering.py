"""Softmax and normalisations."""

from __future__ import annotations

from math import prod

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.registry import Item, LoweringContext, get_compute_type, lowers, require_operand
from traincast.costs.kernels.rowwise import NORM, SOFTMAX
from traincast.costs.kernels.streaming import REDUCTION
from traincast.costs.kernels.streaming.launches import make_elementwise_call, make_reduction_call, make_small_kernel
from traincast.ir.ops import Signature, TensorSpec

_SOFTMAX = {
    "aten::_softmax": "forward",
    "aten::_log_softmax": "log_forward",
    "aten::_softmax_backward_data": "backward",
    "aten::_log_softmax_backward_data": "log_backward",
}


def _read_dim(signature: Signature) -> int:
    dim = signature.scalar("dim", -1)
    return dim if isinstance(dim, int) else -1


def _make_softmax_call(kind: str, spec: TensorSpec, dim: int) -> KernelCall:
    cols = spec.shape[dim] if spec.shape else 1
    return SOFTMAX.call(kind, get_compute_type(spec), rows=spec.numel // max(1, cols), cols=cols)


@lowers(*_SOFTMAX)
def lower_softmax(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel over the rows along `dim`; softmax's backward first multiplies gradient and output in another."""
    spec = signature.inputs[0]
    if not spec.numel:
        return ()
    kind = _SOFTMAX[signature.name]
    product_of = (make_elementwise_call("mul", signature.inputs[:2], (spec,)),) if kind == "backward" else ()
    return (*product_of, _make_softmax_call(kind, spec, _read_dim(signature)))


@lowers("aten::_safe_softmax")
def lower_safe_softmax(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Softmax, then rows that were wholly masked become zero."""
    spec = signature.inputs[0]
    dim = _read_dim(signature)
    mask = TensorSpec(spec.shape, spec.stride, "bool", spec.device)
    rows = REDUCTION.call(
        "inner",
        "bool",
        elements=spec.numel,
        outputs=spec.numel // spec.shape[dim],
        bytes_read=mask.nbytes,
        bytes_written=spec.numel // spec.shape[dim],
    )
    compare = make_elementwise_call("compare", (spec,), (mask,), compute=get_compute_type(spec))
    return (_make_softmax_call("forward", spec, dim), compare, rows, make_elementwise_call("compare", (spec,), (spec,)))


@lowers("aten::_masked_softmax", "aten::_masked_softmax_backward")
def lower_masked_softmax(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel like plain softmax."""
    kind = "backward" if signature.name.endswith("backward") else "forward"
    return (_make_softmax_call(kind, signature.inputs[0], _read_dim(signature)),)


def _read_layer_shape(signature: Signature, spec: TensorSpec) -> tuple[int, int]:
    shape = signature.scalar("normalized_shape")
    dims = len(shape) if isinstance(shape, tuple) else 1
    cols = prod(spec.shape[len(spec.shape) - dims :])
    return spec.numel // max(1, cols), cols


_APEX = "apex::fused_layer_norm_affine_"


@lowers("aten::native_layer_norm", "aten::_fused_rms_norm", "aten::rms_norm", f"{_APEX}fwd")
def lower_layer_norm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; in PyTorch's own before 1.13 the moments are taken in a first and a second normalises."""
    spec = signature.inputs[0]
    rows, cols = _read_layer_shape(signature, spec)
    if context.framework_version >= (1, 13) or signature.name.startswith(_APEX):
        return (NORM.call("layer_forward", get_compute_type(spec), rows=rows, cols=cols),)
    moments = TensorSpec((2, rows), (rows, 1), "float32", spec.device)
    return (
        make_reduction_call("inner", spec, (moments,)),
        make_elementwise_call("mul", (spec, *signature.inputs[1:]), signature.outputs[:1]),
    )


@lowers("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward", f"{_APEX}bwd")
def lower_layer_norm_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for the input's gradient, one for the weight's and bias's, as `output_mask` asks."""
    grad = signature.inputs[0]
    rows, cols = _read_layer_shape(signature, grad)
    compute = get_compute_type(grad)
    mask = signature.scalar("output_mask")
    wanted = tuple(bool(item) for item in mask) if isinstance(mask, tuple) else (True, True, True)
    items: tuple[Item, ...] = ()
    apex = signature.name.startswith(_APEX)
    if wanted[0]:
        if context.framework_version < (2, 0) and not apex:
            sums = TensorSpec((2, rows), (rows, 1), "float32", grad.device)
            items += (
                make_reduction_call("inner", grad, (sums,), extra_read=grad.nbytes),
                make_small_kernel("mul", elements=rows),
            )
        items += (NORM.call("layer_backward", compute, rows=rows, cols=cols),)
    if any(wanted[1:]):
        spread = apex or context.framework_version >= (1, 11)
        weights = "layer_backward_weights" if spread else "layer_backward_columns"
        items += (NORM.call(weights, compute, rows=rows, cols=cols),)
    return items


def _make_batch_norm_call(kind: str, spec: TensorSpec) -> KernelCall:
    channels = spec.shape[1] if len(spec.shape) > 1 else 1
    return NORM.call(kind, get_compute_type(spec), rows=channels, cols=spec.numel // max(1, channels))


def _choose_batch_norm(signature: Signature, spec: TensorSpec) -> str:
    """Ending of the kind of its kernels. PyTorch's own do it where neither cuDNN nor MIOpen is asked, for bfloat16;
    rows of channels (NHWC) have others."""
    if len(spec.shape) > 2 and spec.shape[1] > 1 and spec.stride[1] == 1:
        return "_last"
    return "_own" if "native" in signature.name and spec.dtype == "bfloat16" and len(spec.shape) > 1 else ""


@lowers(
    "aten::cudnn_batch_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update", "aten::_batch_norm_impl_index", "aten::miopen_batch_norm",
    "aten::_batch_norm_no_update", "aten::_native_batch_norm_legit_no_training",
    "aten::_batch_norm_with_update_functional",
)  # fmt: skip
def lower_batch_norm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; with running statistics it is a scale and a shift. PyTorch's own kernels are three: statistics of
    every channel, the running ones, then a scale and a shift."""
    spec = require_operand(signature, "input", 0)
    trains = bool(signature.scalar("training", signature.scalar("train", True)))
    if not trains or signature.name.endswith(("no_training", "no_update")):
        return (_make_batch_norm_call("batch_inference", spec),)
    ending = _choose_batch_norm(signature, spec)
    if ending != "_own":
        return (_make_batch_norm_call(f"batch_forward{ending}", spec),)
    running = make_small_kernel("mul", elements=spec.shape[1], compute=get_compute_type(spec))
    return (_make_batch_norm_call("batch_statistics", spec), running, _make_batch_norm_call("batch_inference", spec))


@lowers(
    "aten::cudnn_batch_norm_backward", "aten::native_batch_norm_backward", "aten::batch_norm_backward",
    "aten::miopen_batch_norm_backward",
)  # fmt: skip
def lower_batch_norm_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for all three gradients."""
    spec = signature.inputs[0]
    return (_make_batch_norm_call(f"batch_backward{_choose_batch_norm(signature, spec)}", spec),)


@lowers("aten::native_group_norm")
def lower_group_norm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Moments of every group, scale and shift of every channel, then one element-wise pass."""
    spec = signature.inputs[0]
    statistics = signature.outputs[1:]
    channels = prod(spec.shape[:2])
    return (
        make_reduction_call("inner", spec, statistics),
        make_small_kernel("mul", elements=channels, compute=get_compute_type(spec)),
        make_elementwise_call("mul", (spec,), signature.outputs[:1]),
    )


@lowers("aten::native_group_norm_backward")
def lower_group_norm_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Two sums per channel, their combination, the input's gradient, and the weight's and bias's."""
    grad, source = signature.inputs[:2]
    channels = prod(grad.shape[:2])
    sums = TensorSpec((2, channels), (channels, 1), "float32", grad.device)
    return (
        make_reduction_call("inner", grad, (sums,), extra_read=source.nbytes),
        make_small_kernel("mul", elements=channels, compute=get_compute_type(grad)),
        make_elementwise_call("mul", (grad, source), (grad,)),
        make_small_kernel("add", elements=channels, compute=get_compute_type(grad)),
    )

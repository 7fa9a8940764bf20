"""Convolutions, forward and backward. cuDNN leaves the bias to a kernel of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    choose_reduction_kind,
    find_operand,
    get_gemm_compute_type,
    lowers,
    read_integer_sizes,
    require_operand,
)
from traincast.costs.kernels.streaming.launches import make_iterated_call, make_layout_copy, make_reduction_call
from traincast.hardware.device import AMPERE
from traincast.ir.ops import Signature, TensorSpec
from traincast.utils.errors import TraincastError

_GROUPS_AT_ONCE, _CHANNELS_AT_ONCE, _TAPS_AT_ONCE = 32, 16, 9  # of the groups that cuDNN has kernels for
# time of groups over that of the kernels of PyTorch 1.13 on, and of those that plain cores multiply over that before
# 1.12: RTX 3090, timm's families that are not held back
_GROUPED_BEFORE, _DIRECT_SINCE = 1.7, 0.67
# since this PyTorch, the cuDNN that comes with it saves half of the copies between layouts: ResNet-50 on A100 and A6000
# takes 0.83 to 0.87 of its time with 1.7 and 1.9, in fp16 and TF32 alike (Lambda's boards that are not held back)
_TURNS_HALF_SINCE, _HALF = (1, 13), 0.5
# since this PyTorch (cuDNN 7.6.5) chips without units for fp16 have no Winograd in it: VGG on TITAN Xp takes 1.5 times
# as long, on GTX 1080 Ti with an older one it does not (torchvision's nets that are not held back)
_NO_HALF_WINOGRAD_SINCE = (1, 5)


@dataclass(frozen=True, slots=True)
class _Window:
    """The geometry of a convolution's window; one number per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool

    @staticmethod
    def of(signature: Signature, spatial: int) -> _Window:
        """From an op's scalars."""
        groups = signature.scalar("groups", 1)
        window = _Window(
            stride=read_integer_sizes(signature.scalar("stride"), spatial, 1),
            padding=read_integer_sizes(signature.scalar("padding"), spatial, 0),
            dilation=read_integer_sizes(signature.scalar("dilation"), spatial, 1),
            groups=groups if isinstance(groups, int) else 1,
            transposed=bool(signature.scalar("transposed", False)) or "transpose" in signature.name,
        )
        if min(*window.stride, *window.dilation, window.groups) < 1 or min(window.padding) < 0:
            raise TraincastError("stride, dilation and groups must be 1 or more, padding 0 or more")
        return window


def _choose_conv_compute(source: TensorSpec, context: LoweringContext) -> str:
    return get_gemm_compute_type(source, tf32=context.tf32 or context.tf32_convolutions)


def _make_conv_call(
    kind: str, image: TensorSpec, result: TensorSpec, weight: TensorSpec, window: _Window, context: LoweringContext
) -> Item:
    """One convolution kernel: `image` is the wide side of the (not transposed) convolution, `result` its output.

    One spatial dimension becomes two, the first of size 1. Of three, the first is unrolled: a window of depth d
    over D output planes is D times as many images of d times as many channels.
    """
    lift = 2 - len(image.shape[2:])
    pad = (1,) * max(lift, 0)
    cut = max(-lift, 0)
    depth = prod(weight.shape[2 : 2 + cut])
    planes = prod(result.shape[2 : 2 + cut])
    in_h, in_w = (*pad, *image.shape[2 + cut :])
    kernel_h, kernel_w = (*pad, *weight.shape[2 + cut :])
    stride_h, stride_w = (*pad, *window.stride[cut:])
    pad_h, pad_w = (*(0 for _ in pad), *window.padding[cut:])
    dilation_h, dilation_w = (*pad, *window.dilation[cut:])
    last = _runs_channels_last(image, result, weight, context)
    direct = last and image.itemsize == 2 and _lacks_grouped_gemm(window.groups, image.shape[1], weight, context)
    return CONV.call(
        kind,
        _choose_conv_compute(image, context),
        batch=image.shape[0] * planes,
        in_channels=image.shape[1] * depth,
        out_channels=result.shape[1],
        in_h=in_h,
        in_w=in_w,
        kernel_h=kernel_h,
        kernel_w=kernel_w,
        stride_h=stride_h,
        stride_w=stride_w,
        pad_h=pad_h,
        pad_w=pad_w,
        dilation_h=dilation_h,
        dilation_w=dilation_w,
        groups=window.groups,
        channels_last=_count_saved_copies(context, last=last),
        direct=int(direct),
        searched=int(context.searched),
        slowness=_find_slowness(window.groups, image, context, last=last, direct=direct),
        winograd=int(context.framework_version < _NO_HALF_WINOGRAD_SINCE),
    )


def _count_saved_copies(context: LoweringContext, *, last: bool) -> float:
    """The share of an image and its result that the kernel takes as they are."""
    if last:
        return 1.0
    return _HALF if context.capability and context.framework_version >= _TURNS_HALF_SINCE else 0.0


def _lacks_grouped_gemm(groups: int, channels: int, weight: TensorSpec, context: LoweringContext) -> bool:
    """Whether cuDNN, as PyTorch came with it, computes these groups without matrix units in channels last. Before 1.12
    it had kernels for multiples of 32 groups (and others for one channel a group), in 1.12 for 32 groups and for 3x3 of
    16 channels a group."""
    if groups in (1, channels) or context.framework_version >= (1, 13):
        return False
    if context.framework_version < (1, 12):
        return groups % _GROUPS_AT_ONCE != 0
    small = channels // groups == _CHANNELS_AT_ONCE and prod(weight.shape[2:]) == _TAPS_AT_ONCE
    return groups != _GROUPS_AT_ONCE and not small


def _find_slowness(groups: int, image: TensorSpec, context: LoweringContext, *, last: bool, direct: bool) -> float:
    """How many times as long as modelled the release's kernels of these groups take. Those of older releases were slow
    on RTX 3090; in channels last before Ampere, V100's ResNeXts do not show it (16 rows, all in view; no source)."""
    if groups in (1, image.shape[1]) or image.itemsize != 2 or not context.capability:
        return 1.0
    before = context.framework_version < (1, 12)
    if direct:
        return 1.0 if before else _DIRECT_SINCE
    fast = last and context.capability < AMPERE
    return _GROUPED_BEFORE if before and not fast else 1.0


def _runs_channels_last(image: TensorSpec, result: TensorSpec, weight: TensorSpec, context: LoweringContext) -> bool:
    """Whether the kernel takes channels last: on NVIDIA's GPUs where either the image or the weights are so."""
    if context.capability and (_is_surely_channels_last(image) or _is_surely_channels_last(weight)):
        return True
    return _is_channels_last(image) and _is_channels_last(result)


def _is_surely_channels_last(spec: TensorSpec) -> bool:
    """Whether the strides can only be those of channels last: neighbours in a row are all channels apart."""
    apart = spec.shape[1] > 1 and spec.stride[1] == 1 and spec.stride[-1] == spec.shape[1]
    return apart and len(spec.shape) > 3


def _turn_to_channels_last(
    tensors: Sequence[TensorSpec], weight: TensorSpec, context: LoweringContext
) -> tuple[Item, ...]:
    """PyTorch's copies of those images that are not as the kernel takes them."""
    if not context.capability or not any(map(_is_surely_channels_last, (*tensors, weight))):
        return ()
    return tuple(make_layout_copy(spec) for spec in tensors if not _is_channels_last(spec))


def _is_channels_last(spec: TensorSpec) -> bool:
    """Whether the channels of one position are side by side."""
    return spec.shape[1] == 1 or spec.stride[1] == 1


@lowers(
    "aten::convolution", "aten::_convolution", "aten::convolution_overrideable", "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose", "aten::_conv_depthwise2d", "aten::conv_depthwise3d",
    "aten::thnn_conv2d", "aten::_slow_conv2d_forward", "aten::slow_conv3d_forward", "aten::miopen_convolution",
    "aten::miopen_depthwise_convolution", "aten::miopen_convolution_transpose",
    "aten::conv1d", "aten::conv2d", "aten::conv3d",
)  # fmt: skip
def lower_convolution(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The convolution, and an addition of the bias. A transposed one is the data gradient of the plain one."""
    source, weight, bias = signature.inputs[0], signature.inputs[1], find_operand(signature, "bias", 2)
    output = signature.outputs[0]
    window = _Window.of(signature, len(source.shape) - 2)
    kind, image, result = ("backward_data", output, source) if window.transposed else ("forward", source, output)
    calls = _turn_to_channels_last((source,), weight, context)
    calls += (_make_conv_call(kind, image, result, weight, window, context),)
    if bias is not None:
        calls += (make_iterated_call("add", (output, bias), (output,)),)
    return calls


@lowers("aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu")
def lower_fused_convolution(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A convolution whose bias and activation run in its epilogue."""
    source, weight = signature.inputs[:2]
    window = _Window.of(signature, len(source.shape) - 2)
    return (_make_conv_call("forward", source, signature.outputs[0], weight, window, context),)


@lowers(
    "aten::convolution_backward", "aten::convolution_backward_overrideable", "aten::cudnn_convolution_backward",
    "aten::_slow_conv2d_backward", "aten::miopen_convolution_backward",
)  # fmt: skip
def lower_convolution_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Data gradient, weight gradient and bias sum, as `output_mask` asks."""
    grad, source = _read_grad_and_source(signature)
    weight = require_operand(signature, "weight", 2)
    window = _Window.of(signature, len(source.shape) - 2)
    mask = signature.scalar("output_mask")
    wanted = tuple(bool(item) for item in mask) if isinstance(mask, tuple) else (True, True, False)
    calls = _turn_to_channels_last((grad, source), weight, context)
    image, result = (grad, source) if window.transposed else (source, grad)
    if wanted[0]:
        kind = "forward" if window.transposed else "backward_data"
        calls += (_make_conv_call(kind, image, result, weight, window, context),)
    if wanted[1]:
        calls += (_make_conv_call("backward_weights", image, result, weight, window, context),)
    if len(wanted) > 2 and wanted[2]:
        dims = [d for d in range(len(grad.shape)) if d != 1]
        bias = TensorSpec((grad.shape[1],), (1,), grad.dtype, grad.device)
        calls += (make_reduction_call(choose_reduction_kind(grad, dims), grad, (bias,)),)
    return calls


def _read_grad_and_source(signature: Signature) -> tuple[TensorSpec, TensorSpec]:
    """`cudnn_convolution_backward` takes the input first, its successor the gradient."""
    if signature.groups and signature.groups[0][0] in ("self", "input"):
        return signature.inputs[1], signature.inputs[0]
    return signature.inputs[0], signature.inputs[1]

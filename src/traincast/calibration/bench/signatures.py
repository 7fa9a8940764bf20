"""Signatures of ops out of named tensors and of host overheads, sizes drawn even in their logarithm, and drawn ops on
images."""

from __future__ import annotations

import math

import numpy as np

from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.traces.overheads.extraction import TYPES
from traincast.utils.errors import TraincastError

Random = np.random.Generator
_OVERHEAD = "traincast::overhead"
MOST_FLOPS = 2.5e9  # of one call: 25 ms of a core


def make_spec(*shape: int, dtype: str = "float32", transposed: bool = False) -> TensorSpec:
    """A dense tensor; with `transposed` its last two dimensions are the other way round in memory."""
    laid = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    stride, step = [0] * len(shape), 1
    for position in range(len(laid) - 1, -1, -1):
        stride[position], step = step, step * max(laid[position], 1)
    if transposed:
        stride[-1], stride[-2] = stride[-2], stride[-1]
    return TensorSpec(tuple(shape), tuple(stride), dtype)


def make_op(
    name: str, inputs: list[tuple[str, TensorSpec]], outputs: list[TensorSpec], overload: str = "", /, **scalars: Scalar
) -> Signature:
    """A signature from named tensors."""
    groups = tuple((argument, 1) for argument, _ in inputs)
    made = tuple(tensor for _, tensor in inputs)
    return Signature(f"aten::{name}", made, tuple(outputs), tuple(scalars.items()), groups, overload)


def draw_size(random: Random, low: float, high: float) -> int:
    """A size between two, even in its logarithm."""
    exact = float(2.0 ** random.uniform(math.log2(low), math.log2(high)))
    if random.random() < 0.15:
        return max(round(exact), 1)
    power = 2.0 ** math.floor(math.log2(exact))
    return max(int(power * math.floor(4 * exact / power) / 4), 1)


def _draw_conv_sizes(random: Random) -> tuple[TensorSpec, TensorSpec, TensorSpec, dict[str, Scalar]]:
    while True:
        window = int(random.choice([1, 3, 3, 5, 7]))
        batch, side = draw_size(random, 1, 32), draw_size(random, 7, 128)
        channels, filters = (3 if random.random() < 0.1 else draw_size(random, 16, 512)), draw_size(random, 16, 512)
        stride = int(random.choice([1, 1, 1, 2]))
        pad = window // 2
        out = (side + 2 * pad - window) // stride + 1
        if 1e6 < 2.0 * batch * out * out * filters * channels * window**2 < 2 * MOST_FLOPS:
            break
    scalars: dict[str, Scalar] = {
        "stride": (stride, stride), "padding": (pad, pad), "dilation": (1, 1), "transposed": False,
        "output_padding": (0, 0), "groups": 1,
    }  # fmt: skip
    weight = make_spec(filters, channels, window, window)
    return make_spec(batch, channels, side, side), weight, make_spec(batch, filters, out, out), scalars


def draw_conv(random: Random) -> Signature:
    """A convolution, half of them with a bias."""
    data, weight, out, scalars = _draw_conv_sizes(random)
    tensors = [("input", data), ("weight", weight)]
    if random.random() < 0.5:
        return make_op("convolution", [*tensors, ("bias", make_spec(out.shape[1]))], [out], "", **scalars)
    return make_op("convolution", tensors, [out], "", bias=None, **scalars)


def draw_conv_backward(random: Random) -> Signature:
    """Its gradients: of weights, mostly of data, half of them of a bias."""
    data, weight, out, scalars = _draw_conv_sizes(random)
    wanted, biased = bool(random.random() < 0.85), bool(random.random() < 0.5)
    tensors = [("grad_output", out), ("input", data), ("weight", weight)]
    return make_op(
        "convolution_backward",
        tensors,
        [data, weight, *([make_spec(out.shape[1])] if biased else [])],
        "",
        bias_sizes=(out.shape[1],) if biased else None,
        output_mask=(wanted, True, biased),
        **scalars,
    )


def _draw_image(random: Random) -> TensorSpec:
    while True:
        batch, channels, side = draw_size(random, 1, 32), draw_size(random, 16, 1024), draw_size(random, 7, 128)
        if batch * channels * side**2 < 8e6:
            return make_spec(batch, channels, side, side)


def draw_batch_norm(random: Random) -> Signature:
    """Batch norm in training."""
    image = _draw_image(random)
    channels = make_spec(image.shape[1])
    tensors = [("input", image), *((name, channels) for name in ("weight", "bias", "running_mean", "running_var"))]
    return make_op("native_batch_norm", tensors, [image, channels, channels], training=True, momentum=0.1, eps=1e-5)


def draw_batch_norm_backward(random: Random) -> Signature:
    """Its gradients."""
    image = _draw_image(random)
    channels = make_spec(image.shape[1])
    names = ("weight", "running_mean", "running_var", "save_mean", "save_invstd")
    tensors = [("grad_out", image), ("input", image), *((name, channels) for name in names)]
    return make_op("native_batch_norm_backward", tensors, [image, channels, channels], train=True, eps=1e-5,
              output_mask=(True, True, True))  # fmt: skip


def _draw_pool_sizes(random: Random) -> tuple[TensorSpec, TensorSpec, TensorSpec, dict[str, Scalar]]:
    """(image, its half, where the largest were, arguments)"""
    image = _draw_image(random)
    batch, channels, side, _ = image.shape
    window = int(random.choice([2, 3]))
    half = make_spec(batch, channels, *((side + 2 * (window // 3) - window) // 2 + 1,) * 2)
    arguments: dict[str, Scalar] = {
        "kernel_size": (window, window), "stride": (2, 2), "padding": (window // 3,) * 2, "dilation": (1, 1),
        "ceil_mode": False,
    }  # fmt: skip
    return image, half, TensorSpec(half.shape, half.stride, "int64"), arguments


def draw_pool(random: Random) -> Signature:
    """Max pooling to half the side."""
    image, half, indices, arguments = _draw_pool_sizes(random)
    return make_op("max_pool2d_with_indices", [("self", image)], [half, indices], "", **arguments)


def draw_pool_backward(random: Random) -> Signature:
    """Its gradient."""
    image, half, indices, arguments = _draw_pool_sizes(random)
    tensors = [("grad_output", half), ("self", image), ("indices", indices)]
    return make_op("max_pool2d_with_indices_backward", tensors, [image], "", **arguments)


def make_overhead_signature(kind: str, name: str) -> Signature:
    """An overhead ("T2") of an op, an issuer or a runtime call as the signature of a sample."""
    return Signature(_OVERHEAD, (), (), (("overhead", kind), ("of", name)))


def is_overhead(signature: Signature | None) -> bool:
    """Whether a sample is of a host's overhead."""
    return signature is not None and signature.name == _OVERHEAD


def parse_overhead_signature(signature: Signature) -> tuple[str, str]:
    """(type, what it belongs to) of a sample's signature."""
    kind, name = signature.scalar("overhead"), signature.scalar("of")
    if kind not in TYPES or not isinstance(name, str):
        raise TraincastError("a sample of a host's overhead in the store is damaged; measure it again")
    return str(kind), name

"""Ops on images, drawn: convolutions, batch norm and pooling, both ways."""

from __future__ import annotations

from traincast.calibration.bench.signatures import MOST_FLOPS, Random, op, size, spec
from traincast.ir.ops import Scalar, Signature, TensorSpec


def _conv_sizes(random: Random) -> tuple[TensorSpec, TensorSpec, TensorSpec, dict[str, Scalar]]:
    while True:
        window = int(random.choice([1, 3, 3, 5, 7]))
        batch, side = size(random, 1, 32), size(random, 7, 128)
        channels, filters = (3 if random.random() < 0.1 else size(random, 16, 512)), size(random, 16, 512)
        stride = int(random.choice([1, 1, 1, 2]))
        pad = window // 2
        out = (side + 2 * pad - window) // stride + 1
        if 1e6 < 2.0 * batch * out * out * filters * channels * window**2 < 2 * MOST_FLOPS:
            break
    scalars: dict[str, Scalar] = {
        "stride": (stride, stride), "padding": (pad, pad), "dilation": (1, 1), "transposed": False,
        "output_padding": (0, 0), "groups": 1,
    }  # fmt: skip
    weight = spec(filters, channels, window, window)
    return spec(batch, channels, side, side), weight, spec(batch, filters, out, out), scalars


def conv(random: Random) -> Signature:
    """A convolution, half of them with a bias."""
    data, weight, out, scalars = _conv_sizes(random)
    tensors = [("input", data), ("weight", weight)]
    if random.random() < 0.5:
        return op("convolution", [*tensors, ("bias", spec(out.shape[1]))], [out], "", **scalars)
    return op("convolution", tensors, [out], "", bias=None, **scalars)


def conv_backward(random: Random) -> Signature:
    """Its gradients: of weights, mostly of data, half of them of a bias."""
    data, weight, out, scalars = _conv_sizes(random)
    wanted, biased = bool(random.random() < 0.85), bool(random.random() < 0.5)
    tensors = [("grad_output", out), ("input", data), ("weight", weight)]
    return op(
        "convolution_backward",
        tensors,
        [data, weight, *([spec(out.shape[1])] if biased else [])],
        "",
        bias_sizes=(out.shape[1],) if biased else None,
        output_mask=(wanted, True, biased),
        **scalars,
    )


def _image(random: Random) -> TensorSpec:
    while True:
        batch, channels, side = size(random, 1, 32), size(random, 16, 1024), size(random, 7, 128)
        if batch * channels * side**2 < 8e6:
            return spec(batch, channels, side, side)


def batch_norm(random: Random) -> Signature:
    """Batch norm in training."""
    image = _image(random)
    channels = spec(image.shape[1])
    tensors = [("input", image), *((name, channels) for name in ("weight", "bias", "running_mean", "running_var"))]
    return op("native_batch_norm", tensors, [image, channels, channels], training=True, momentum=0.1, eps=1e-5)


def batch_norm_backward(random: Random) -> Signature:
    """Its gradients."""
    image = _image(random)
    channels = spec(image.shape[1])
    names = ("weight", "running_mean", "running_var", "save_mean", "save_invstd")
    tensors = [("grad_out", image), ("input", image), *((name, channels) for name in names)]
    return op("native_batch_norm_backward", tensors, [image, channels, channels], train=True, eps=1e-5,
              output_mask=(True, True, True))  # fmt: skip


def _pool_sizes(random: Random) -> tuple[TensorSpec, TensorSpec, TensorSpec, dict[str, Scalar]]:
    """(image, its half, where the largest were, arguments)"""
    image = _image(random)
    batch, channels, side, _ = image.shape
    window = int(random.choice([2, 3]))
    half = spec(batch, channels, *((side + 2 * (window // 3) - window) // 2 + 1,) * 2)
    arguments: dict[str, Scalar] = {
        "kernel_size": (window, window), "stride": (2, 2), "padding": (window // 3,) * 2, "dilation": (1, 1),
        "ceil_mode": False,
    }  # fmt: skip
    return image, half, TensorSpec(half.shape, half.stride, "int64"), arguments


def pool(random: Random) -> Signature:
    """Max pooling to half the side."""
    image, half, indices, arguments = _pool_sizes(random)
    return op("max_pool2d_with_indices", [("self", image)], [half, indices], "", **arguments)


def pool_backward(random: Random) -> Signature:
    """Its gradient."""
    image, half, indices, arguments = _pool_sizes(random)
    tensors = [("grad_output", half), ("self", image), ("indices", indices)]
    return op("max_pool2d_with_indices_backward", tensors, [image], "", **arguments)

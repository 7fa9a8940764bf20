"""Signatures of ops out of named tensors, and sizes drawn even in their logarithm."""

from __future__ import annotations

import math

import numpy as np

from traincast.ir.ops import Scalar, Signature, TensorSpec

Random = np.random.Generator
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

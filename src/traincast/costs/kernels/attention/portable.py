"""Attention without a fused kernel: two products and a softmax one by one, as `_scaled_dot_product_attention_math`."""

from __future__ import annotations

from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.operands import compute_of, product_compute
from traincast.costs.kernels.registry import Item, LoweringContext
from traincast.costs.kernels.rowwise import SOFTMAX
from traincast.costs.kernels.streaming.launches import elementwise, layout_copy
from traincast.ir.ops import TensorSpec

_WIDENS = (2, 5)  # since this version of PyTorch half precision is widened to fp32


def _dense(shape: tuple[int, ...], dtype: str, device: str) -> TensorSpec:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return TensorSpec(shape, tuple(reversed(strides)), dtype, device)


def portable_attention(
    kind: str, query: TensorSpec, key: TensorSpec, *, heads: int, masked: bool, dropout: bool, context: LoweringContext
) -> tuple[Item, ...]:
    """Kernels of the forward or backward pass, `heads` being the dimension that counts heads."""
    batch, positions = query.shape[0] * query.shape[heads], 3 - heads
    rows, columns, width = query.shape[positions], key.shape[positions], query.shape[-1]
    wide = query.itemsize < 4 and context.framework_version >= _WIDENS
    dtype = "float32" if wide else query.dtype
    small, scores = (_dense((batch, rows, size), dtype, query.device) for size in (width, columns))
    repeated = _dense((batch, columns, width), dtype, query.device)
    sides = (small, repeated, repeated)
    casts: list[Item] = [elementwise("copy", (query,), (side,)) for side in sides] if wide else []
    if query.shape[heads] != key.shape[heads]:
        casts += [layout_copy(repeated)] * 2  # every key head once for each of its query heads
    compute = product_compute(small, tf32=context.tf32)

    def product(m: int, n: int, k: int) -> Item:
        return GEMM.call("bmm", compute, batch=batch, m=m, n=n, k=k, trans_a=0, trans_b=0, bias=0)

    softmax = SOFTMAX.call(kind, compute_of(scores), rows=batch * rows, cols=columns)
    scale: list[Item] = [elementwise("mul", (side,), (side,)) for side in (small, repeated)]
    mask: list[Item] = [elementwise("add", (scores, scores), (scores,))] if masked and kind == "forward" else []
    drop: list[Item] = [elementwise("dropout", (scores,), (scores, scores))] if dropout else []
    if kind == "forward":
        outer = (product(rows, columns, width), *mask, softmax, *drop, product(rows, width, columns))
        return (*casts, *scale, *outer)
    values = (product(columns, width, rows), product(rows, columns, width))
    keys = (product(rows, width, columns), product(columns, width, rows))
    return (*values, *drop, softmax, *keys, *scale, *casts)

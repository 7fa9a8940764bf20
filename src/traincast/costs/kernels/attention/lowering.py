"""Attention: its masks, the backend that PyTorch chooses, its fused kernels, or GEMMs and a softmax where nothing is
fused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    get_compute_type,
    get_gemm_compute_type,
    lowers,
    read_integer_argument,
    require_operand,
)
from traincast.costs.kernels.rowwise import SOFTMAX
from traincast.costs.kernels.streaming.launches import make_elementwise_call, make_layout_copy, make_reduction_call
from traincast.hardware.device import ADA, AMPERE, VOLTA
from traincast.ir.ops import EFFECTIVE_LENGTH, POINTWISE, POINTWISE_BACKWARD, Signature, TensorSpec

_BLOCK = 128  # queries that a block of fused attention works on, and keys of its step
_CAUSAL, _LOWER_RIGHT = 1, 2  # `custom_mask_type` of the memory-efficient kernel


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: so many `before` and `after` its own place (-1: all). Places are counted from the first
    query and key, or from the last ones (`lower_right`), which matters where there are more keys than queries."""

    before: int = -1
    after: int = -1
    lower_right: bool = False

    @staticmethod
    def of(signature: Signature) -> Mask:
        """Of an op of PyTorch's: flash attention aligns the last query and key, `scaled_dot_product_attention` the
        first."""
        kind = read_integer_argument(signature, "custom_mask_type")
        before, after = _read_sides(signature)
        before = read_integer_argument(signature, "window_size_left", before)
        after = read_integer_argument(signature, "window_size_right", after)
        if signature.scalar("is_causal", False) or kind in (_CAUSAL, _LOWER_RIGHT):
            after = 0
        last = kind == _LOWER_RIGHT if kind else not signature.name.startswith("aten::_scaled")
        return Mask(before, after, lower_right=last)

    @property
    def causal(self) -> bool:
        """Whether no query sees what comes after it."""
        return self.after == 0

    def count_keys(self, queries: int, keys: int) -> tuple[int, bool]:
        """Keys that a query meets, and whether half of them are under the diagonal of a square causal mask. Of other
        masks, the keys of all steps that a block of queries makes: a narrow window costs whole tiles."""
        if self.before < 0 and (self.after < 0 or (self.causal and queries == keys)):
            return keys, self.causal
        first = np.arange(0, queries, _BLOCK)
        last = np.minimum(first + _BLOCK, queries) - 1
        shift = keys - queries if self.lower_right else 0
        begin = np.maximum(first + shift - self.before, 0) if self.before >= 0 else np.zeros_like(first)
        end = np.minimum(last + shift + self.after, keys - 1) if self.after >= 0 else np.full_like(last, keys - 1)
        tiles = np.where(end < begin, 0, end // _BLOCK - begin // _BLOCK + 1)
        seen = np.minimum(tiles * _BLOCK, keys) * (last - first + 1)
        return max(1, round(float(seen.sum()) / queries)), False


def _read_sides(signature: Signature) -> tuple[int, int]:
    """Of a window that is given as a pair."""
    given = signature.scalar("window_size")
    sides = tuple(side for side in given if isinstance(side, int)) if isinstance(given, tuple) else ()
    return (sides[0], sides[1]) if len(sides) == 2 else (-1, -1)


_HALF = ("float16", "bfloat16")
_FLASH_WIDEST = 256  # elements of a head
# consumer Ampere, Ada and graphics Blackwell lack the shared memory for the backward of heads in this range
_GRAPHICS = ((8.6, ADA), (12.0, 12.9))
_TOO_WIDE_FOR_GRAPHICS = (192, 224)
_WIDENS = (2, 5)  # since this version of PyTorch half precision is widened to fp32
_ALIGNED = 8  # elements that the heads of flash attention are multiples of


def choose_backend(
    query: TensorSpec, key: TensorSpec, *, masked: bool, causal: bool, heads: int, context: LoweringContext
) -> str:
    """ "flash", "efficient" or "math"; `heads` is the dimension that counts heads."""
    if context.capability and context.capability < VOLTA - 2:
        return "math"
    same_heads = query.shape[heads] == key.shape[heads]
    if not masked and _can_run_flash(query, key, causal, 3 - heads, context):
        return "flash"
    return "efficient" if same_heads and _can_run_efficient(query, context) else "math"


def _can_run_flash(query: TensorSpec, key: TensorSpec, causal: bool, positions: int, context: LoweringContext) -> bool:
    width, capability = query.shape[-1], context.capability
    if query.dtype not in _HALF or width > _FLASH_WIDEST or 0 < capability < AMPERE:
        return False
    low, high = _TOO_WIDE_FOR_GRAPHICS
    if low < width <= high and any(first <= capability <= last for first, last in _GRAPHICS):
        return False
    return not causal or query.shape[positions] == key.shape[positions]


def _can_run_efficient(query: TensorSpec, context: LoweringContext) -> bool:
    old = 0 < context.capability < AMPERE
    if query.dtype == "bfloat16":
        return not old and query.shape[-1] % 8 == 0
    if query.dtype == "float16":
        return query.shape[-1] % 8 == 0
    return query.dtype == "float32" and (old or query.shape[-1] % 4 == 0)


def _is_dense_mask(shape: tuple[int, ...], dtype: str, device: str) -> TensorSpec:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return TensorSpec(shape, tuple(reversed(strides)), dtype, device)


def lower_portable_attention(
    kind: str, query: TensorSpec, key: TensorSpec, *, heads: int, masked: bool, dropout: bool, context: LoweringContext
) -> tuple[Item, ...]:
    """Kernels of the forward or backward pass, `heads` being the dimension that counts heads."""
    batch, positions = query.shape[0] * query.shape[heads], 3 - heads
    rows, columns, width = query.shape[positions], key.shape[positions], query.shape[-1]
    wide = query.itemsize < 4 and context.framework_version >= _WIDENS
    dtype = "float32" if wide else query.dtype
    small, scores = (_is_dense_mask((batch, rows, size), dtype, query.device) for size in (width, columns))
    repeated = _is_dense_mask((batch, columns, width), dtype, query.device)
    sides = (small, repeated, repeated)
    casts: list[Item] = [make_elementwise_call("copy", (query,), (side,)) for side in sides] if wide else []
    if query.shape[heads] != key.shape[heads]:
        casts += [make_layout_copy(repeated)] * 2  # every key head once for each of its query heads
    compute = get_gemm_compute_type(small, tf32=context.tf32)

    def product(m: int, n: int, k: int) -> Item:
        return GEMM.call("bmm", compute, batch=batch, m=m, n=n, k=k, trans_a=0, trans_b=0, bias=0)

    softmax = SOFTMAX.call(kind, get_compute_type(scores), rows=batch * rows, cols=columns)
    scale: list[Item] = [make_elementwise_call("mul", (side,), (side,)) for side in (small, repeated)]
    mask: list[Item] = (
        [make_elementwise_call("add", (scores, scores), (scores,))] if masked and kind == "forward" else []
    )
    drop: list[Item] = [make_elementwise_call("dropout", (scores,), (scores, scores))] if dropout else []
    if kind == "forward":
        outer = (product(rows, columns, width), *mask, softmax, *drop, product(rows, width, columns))
        return (*casts, *scale, *outer)
    values = (product(columns, width, rows), product(rows, columns, width))
    keys = (product(rows, width, columns), product(columns, width, rows))
    return (*values, *drop, softmax, *keys, *scale, *casts)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Query and key of an op; `heads` is the dimension that counts heads: `_scaled_*` ops put them before positions."""

    query: TensorSpec
    key: TensorSpec
    heads: int
    mask: Mask
    masked: bool
    dropout: bool

    @staticmethod
    def of(signature: Signature, first: int) -> _Attention:
        """From an op whose query stands at position `first`."""
        dropout = signature.scalar("dropout_p", 0.0)
        query, key = require_operand(signature, "query", first), require_operand(signature, "key", first + 1)
        if signature.name.startswith("torch_attn::"):
            query = _read_sequences(query, require_operand(signature, "cu_seq_q", first + 3))
            key = _read_sequences(key, require_operand(signature, "cu_seq_q", first + 3))
        return _Attention(
            query=query,
            key=key,
            heads=1 if signature.name.startswith("aten::_scaled") else 2,
            mask=Mask.of(signature),
            masked=any(spec.numel for name in ("attn_bias", "bias") for spec in signature.tensors(name)),
            dropout=isinstance(dropout, float) and dropout > 0,
        )

    def backend(self, context: LoweringContext) -> str:
        """Which kernel runs it on this device."""
        if len(self.query.shape) != 4:
            return "flash"  # sequences of several lengths laid end to end: only flash has them
        return choose_backend(
            self.query, self.key, masked=self.masked, causal=self.mask.causal, heads=self.heads, context=context
        )

    def fused(self, kind: str) -> Item:
        """The fused kernel."""
        positions = 3 - self.heads
        keys, causal = self.mask.count_keys(self.query.shape[positions], self.key.shape[positions])
        return ATTENTION.call(
            kind,
            get_compute_type(self.query),
            batch=self.query.shape[0],
            q_heads=self.query.shape[self.heads],
            kv_heads=self.key.shape[self.heads],
            q_len=self.query.shape[positions],
            kv_len=keys,
            head_dim=self.query.shape[-1] + -self.query.shape[-1] % _ALIGNED,
            causal=int(causal),
        )

    def portable(self, kind: str, context: LoweringContext) -> tuple[Item, ...]:
        """Products and a softmax instead."""
        return lower_portable_attention(
            kind, self.query, self.key, heads=self.heads, masked=self.masked, dropout=self.dropout, context=context
        )

    def padding(self, tensors: int) -> tuple[Item, ...]:
        """Copies that fill heads up to multiples of eight elements, which flash wants."""
        return (make_layout_copy(self.query),) * tensors if self.query.shape[-1] % _ALIGNED else ()


@lowers(
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward",
    "torch_attn::_varlen_attn",
)  # fmt: skip
def lower_attention_forward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel, or the portable ones where the device has no other."""
    attention = _Attention.of(signature, 0)
    chosen = _choose_call(signature, attention, context)
    if chosen == "math":
        return attention.portable("forward", context)
    if chosen == "flash":
        return (*attention.padding(3), attention.fused("forward"))
    return (attention.fused("efficient_forward"),)


@lowers(
    "aten::_scaled_dot_product_flash_attention_backward", "aten::_flash_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward", "aten::_cudnn_attention_backward",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward",
    "aten::_scaled_dot_product_efficient_attention_backward", "aten::_efficient_attention_backward",
    "torch_attn::_varlen_attn_backward",
)  # fmt: skip
def lower_attention_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Flash: row sums of gradient times output, the fused kernel, and the query's gradient rounded from fp32.
    Memory-efficient: the fused kernel; in fp32 the row sums come first, in two kernels."""
    attention = _Attention.of(signature, 1)
    grad, query = signature.inputs[0], attention.query
    chosen = _choose_call(signature, attention, context)
    if chosen == "math":
        return attention.portable("backward", context)
    if chosen == "flash":
        exact = TensorSpec(query.shape, query.stride, "float32", query.device)
        rounded = make_elementwise_call("copy", (exact,), (query,))
        return (*attention.padding(1), _make_row_sums(grad), attention.fused("backward"), rounded)
    main = attention.fused("efficient_backward")
    if query.itemsize < 4:
        return (main,)
    return (
        make_elementwise_call("mul", (grad, grad), (grad,)),
        make_reduction_call("inner", grad, (_count_rows(grad),)),
        main,
    )


@lowers(POINTWISE, f"{POINTWISE}_80", f"{POINTWISE}_90")
def lower_pointwise_forward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """HSTU's: tiles, products and traffic of flash attention, with SiLU for the softmax."""
    return (_make_pointwise_call("forward", signature, 0),)


@lowers(POINTWISE_BACKWARD, f"{POINTWISE_BACKWARD}_80", f"{POINTWISE_BACKWARD}_90")
def lower_pointwise_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The fused kernel, and the query's gradient rounded from fp32; there are no row sums."""
    query = require_operand(signature, "q", 1)
    exact = TensorSpec(query.shape, query.stride, "float32", query.device)
    rounded = make_elementwise_call("copy", (exact,), (query,))
    return (_make_pointwise_call("backward", signature, 1), rounded)


def _make_pointwise_call(kind: str, signature: Signature, first: int) -> Item:
    """Of sequences laid end to end; where nothing says how they differ, they are taken to be equal."""
    query, key = require_operand(signature, "q", first), require_operand(signature, "k", first + 1)
    ends = next((spec for spec in signature.inputs[first + 3 :] if spec.dtype.startswith("int")), None)
    count = max(1, ends.numel - 1) if ends is not None else 1
    length = read_integer_argument(signature, EFFECTIVE_LENGTH, max(1, query.shape[0] // count))
    return ATTENTION.call(
        kind, get_compute_type(query), batch=count, q_heads=query.shape[1], kv_heads=key.shape[1], q_len=length,
        kv_len=length, head_dim=query.shape[-1] + -query.shape[-1] % _ALIGNED, causal=1,
    )  # fmt: skip


def _read_sequences(packed: TensorSpec, ends: TensorSpec) -> TensorSpec:
    """Sequences laid end to end as a batch of equal ones: how long each is, a capture does not say."""
    count = max(1, ends.numel - 1)
    total, heads, width = packed.shape
    shape = (count, max(1, total // count), heads, width)
    return TensorSpec(shape, (shape[1] * heads * width, heads * width, width, 1), packed.dtype, packed.device)


def _choose_call(signature: Signature, attention: _Attention, context: LoweringContext) -> str:
    """The kernel: by the device, or the memory-efficient one that a script has asked for, if the device has it."""
    chosen = "flash" if signature.name.startswith("torch_attn::") else attention.backend(context)
    asked = "_efficient_" in signature.name and chosen == "flash"
    return "efficient" if asked else chosen


def _count_rows(grad: TensorSpec) -> TensorSpec:
    rows = grad.numel // max(1, grad.shape[-1])
    return TensorSpec((rows,), (1,), "float32", grad.device)


def _make_row_sums(grad: TensorSpec) -> Item:
    return make_reduction_call("inner", grad, (_count_rows(grad),), extra_read=grad.nbytes)

"""Which kernel runs attention: the choice that PyTorch makes by device, type and sizes (`sdp_utils.cpp` of 2.13).

FlashAttention, then the memory-efficient kernel (CUTLASS), then products and a softmax one by one ("math").
"""

from __future__ import annotations

from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware.device import ADA, AMPERE, VOLTA
from traincast.ir.ops import TensorSpec

_HALF = ("float16", "bfloat16")
_FLASH_WIDEST = 256  # elements of a head
# consumer Ampere, Ada and graphics Blackwell lack the shared memory for the backward of heads in this range
_GRAPHICS = ((8.6, ADA), (12.0, 12.9))
_TOO_WIDE_FOR_GRAPHICS = (192, 224)


def backend(
    query: TensorSpec, key: TensorSpec, *, masked: bool, causal: bool, heads: int, context: LoweringContext
) -> str:
    """ "flash", "efficient" or "math"; `heads` is the dimension that counts heads."""
    if context.capability and context.capability < VOLTA - 2:
        return "math"
    same_heads = query.shape[heads] == key.shape[heads]
    if not masked and _flash_takes(query, key, causal, 3 - heads, context):
        return "flash"
    return "efficient" if same_heads and _efficient_takes(query, context) else "math"


def _flash_takes(query: TensorSpec, key: TensorSpec, causal: bool, positions: int, context: LoweringContext) -> bool:
    width, capability = query.shape[-1], context.capability
    if query.dtype not in _HALF or width > _FLASH_WIDEST or 0 < capability < AMPERE:
        return False
    low, high = _TOO_WIDE_FOR_GRAPHICS
    if low < width <= high and any(first <= capability <= last for first, last in _GRAPHICS):
        return False
    return not causal or query.shape[positions] == key.shape[positions]


def _efficient_takes(query: TensorSpec, context: LoweringContext) -> bool:
    old = 0 < context.capability < AMPERE
    if query.dtype == "bfloat16":
        return not old and query.shape[-1] % 8 == 0
    if query.dtype == "float16":
        return query.shape[-1] % 8 == 0
    return query.dtype == "float32" and (old or query.shape[-1] % 4 == 0)

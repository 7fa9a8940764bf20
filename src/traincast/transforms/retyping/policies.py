"""What autocast does with an op, and which type an op gives for the types it is given."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from traincast.ir.autocast import BANNED, FLOAT32, FLOAT32_RESULT, LOWER_PRECISION, NORMS, RECURRENT, WIDEST
from traincast.ir.ops import Signature

WIDE = "float32"


class Policy(Enum):
    """What happens to the tensors that an op is given."""

    LOWER = auto()  # cast to 16 bits
    WIDER = auto()  # cast to float32
    RESULT = auto()  # the op is told to give float32
    WIDEST = auto()  # cast to the widest of them
    REFUSED = auto()


def _named(names: Sequence[str], policy: Policy) -> dict[str, Policy]:
    return {f"aten::{name.partition('.')[0]}": policy for name in names}


POLICIES = {
    **_named((*LOWER_PRECISION, *RECURRENT), Policy.LOWER),
    **_named(FLOAT32, Policy.WIDER),
    **_named((*FLOAT32_RESULT, *NORMS), Policy.RESULT),
    **_named(WIDEST, Policy.WIDEST),
    **_named((BANNED,), Policy.REFUSED),
}
"""By the name of the op that a script calls."""
_KERNELS = {
    **_named(("nll_loss_forward", "nll_loss2d_forward"), Policy.WIDER),
    **_named(("_softmax", "_log_softmax"), Policy.RESULT),
    **_named(("_prelu_kernel",), Policy.LOWER),
}
SOFTMAX = ("aten::_softmax", "aten::_log_softmax")
_TYPED = "aten::cross_entropy_loss"
"""Asks its softmax for the type it was given, which autocast leaves alone."""


def policy_of(scope: str, signature: Signature) -> Policy | None:
    """What happens to an op that another op calls; None: nothing."""
    policy = _KERNELS.get(signature.name) or POLICIES.get(signature.name)
    told = scope == _TYPED and signature.name in SOFTMAX
    return None if policy is Policy.RESULT and (told or signature.scalar("dtype") is not None) else policy


_STATISTICS = {
    "aten::native_layer_norm": (1, 2), "aten::native_batch_norm": (1, 2), "aten::cudnn_batch_norm": (1, 2),
    "aten::_scaled_dot_product_fused_attention_overrideable": (1,), "aten::_scaled_dot_product_flash_attention": (1,),
    "aten::_scaled_dot_product_efficient_attention": (1,),
}  # fmt: skip
"""Results that are float32 whatever an op is given."""
_BY_ARGUMENT = {
    "aten::native_batch_norm": ("input",), "aten::cudnn_batch_norm": ("input",),
    "aten::native_layer_norm": ("input",),
    "aten::native_batch_norm_backward": ("input", "weight", "weight"),
    "aten::cudnn_batch_norm_backward": ("input", "weight", "weight"),
    "aten::native_layer_norm_backward": ("input", "weight", "weight"),
    "aten::native_group_norm_backward": ("input", "weight", "weight"),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": ("query", "key", "value", "attn_bias"),
    "aten::_scaled_dot_product_flash_attention_backward": ("query", "key", "value"),
    "aten::_scaled_dot_product_efficient_attention_backward": ("query", "key", "value", "attn_bias"),
    "aten::_scaled_dot_product_fused_attention_overrideable": ("query",),
    "aten::_scaled_dot_product_flash_attention": ("query",),
    "aten::_scaled_dot_product_efficient_attention": ("query",),
}  # fmt: skip
"""The argument whose type each result has, the last for all others; of other ops the widest type decides."""


def result_type(signature: Signature, types: Sequence[str], number: int) -> str:
    """The type of a result that was float32, for the types that an op is now given."""
    if number in _STATISTICS.get(signature.name, ()):
        return WIDE
    by_argument = _BY_ARGUMENT.get(signature.name)
    if by_argument is not None:
        argument = by_argument[min(number, len(by_argument) - 1)]
        for name, span in signature.spans():
            if name == argument and (given := types[span]):
                return given[0]
    if signature.name == "aten::_to_copy":
        return types[0]
    floats = [
        (bool(spec.shape), kind)
        for spec, kind in zip(signature.inputs, types, strict=True)
        if spec.dtype == WIDE and spec.device == "cuda"
    ]
    # a number on the device does not widen tensors
    deciding = [kind for shaped, kind in floats if shaped] or [kind for _, kind in floats]
    return WIDE if not deciding or WIDE in deciding else deciding[0]

"""Fused attention, forward and backward."""

from __future__ import annotations

from traincast.costs.kernels.contract import Family, FamilyRecord

ATTENTION = Family(
    "attention",
    # efficient: the memory-efficient kernel (CUTLASS) of devices, types and masks without flash attention
    ("forward", "backward", "efficient_forward", "efficient_backward"),
    ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal"),
)
RECORD = FamilyRecord(
    family=ATTENTION,
    package=__name__,
    roofline="physics:attention_seconds",
    roofline_sigma=0.45,  # algorithms differ more than shapes say: median error of 32 %
    model="model:AttentionModel",
    profile="attention",
)

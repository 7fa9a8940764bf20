"""Convolutions, forward and backward."""

from __future__ import annotations

from traincast.costs.kernels.contract import Family, FamilyRecord

CONV = Family(
    "conv",
    ("forward", "backward_data", "backward_weights"),
    (
        "batch", "in_channels", "out_channels", "in_h", "in_w", "kernel_h", "kernel_w",
        "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups",
        "channels_last",  # 1 where the tensors already are as tensor cores want them, 0.5 where half need no copy
        "direct",  # 1 where the cuDNN of the day has no GEMM for these groups: plain cores multiply one by one
        "searched",  # 1 where the fastest way was looked for (`cudnn.benchmark`), not picked by a heuristic
        "slowness",  # times as long as modelled, in the release at hand
        "winograd",  # 1 where fp16 without units of its own is multiplied by Winograd's tiles, as fp32 is
    ),
)  # fmt: skip
RECORD = FamilyRecord(
    family=CONV,
    package=__name__,
    roofline="physics:conv_seconds",
    roofline_sigma=0.5,  # algorithms differ more than shapes say: median error of 37 %
    model="model:ConvModel",
    profile="conv",
)

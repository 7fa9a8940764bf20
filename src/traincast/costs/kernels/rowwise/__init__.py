"""Softmax and normalisations: kernels that reduce rows and write them again."""

from __future__ import annotations

from traincast.costs.kernels.contract import Family, FamilyRecord

SOFTMAX = Family("softmax", ("forward", "backward", "log_forward", "log_backward"), ("rows", "cols"))
NORM = Family(
    "norm",
    # layer: rows x cols normalised over cols; batch: rows = channels, cols = batch * positions of one channel
    (
        "layer_forward", "layer_backward", "layer_backward_weights",
        "batch_forward", "batch_backward", "batch_inference", "batch_statistics", "batch_backward_own",
        "batch_forward_last", "batch_backward_last",  # channels last: all SMs share every channel
        "layer_backward_columns",  # weights, before PyTorch 1.11: a block for every 32 columns goes through all rows
    ),
    ("rows", "cols"),
)  # fmt: skip
RECORDS = (
    FamilyRecord(
        family=SOFTMAX,
        package=__name__,
        roofline="physics:softmax_seconds",
        model="model:SoftmaxModel",
        profile="softmax",
    ),
    FamilyRecord(
        family=NORM,
        package=__name__,
        roofline="physics:norm_seconds",
        model="model:NormModel",
        profile="norm",
    ),
)

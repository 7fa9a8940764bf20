"""What kernel calls have to do, whatever the device: operations, and bytes that must move at least once.

Products, convolutions and attention count as in `arithmetic`; streaming kernels one operation an element, since what
they do with it hardly matters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from traincast.costs.kernels.arithmetic import counted_flops
from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.conv.roofline import output_positions
from traincast.utils.arrays import FloatArray

Work = tuple[FloatArray, FloatArray]
"""Operations and bytes of every call."""


def work(calls: Calls) -> Work | None:
    """Operations and bytes of calls of one family; None where there is no arithmetic (transfers, collectives)."""
    function = _WORK.get(calls.family.name)
    return None if function is None else function(calls)


def _gemm(calls: Calls) -> Work:
    batch, m, n, k = (calls[name] for name in ("batch", "m", "n", "k"))
    return counted_flops(calls), batch * (m * k + k * n + m * n) * calls.item_bytes()


def _conv(calls: Calls) -> Work:
    out = calls["batch"] * output_positions(calls)
    pixels = calls["batch"] * calls["in_h"] * calls["in_w"]
    weights = calls["in_channels"] / calls["groups"] * calls["out_channels"] * calls["kernel_h"] * calls["kernel_w"]
    elements = pixels * calls["in_channels"] + out * calls["out_channels"] + weights
    return counted_flops(calls), elements * calls.item_bytes()


def _attention(calls: Calls) -> Work:
    rows = calls["batch"] * (calls["q_heads"] * calls["q_len"] + calls["kv_heads"] * calls["kv_len"])
    passes = np.where(calls.is_kind("backward", "efficient_backward"), 4.0, 2.0)
    return counted_flops(calls), passes * rows * calls["head_dim"] * calls.item_bytes()


def _streaming(calls: Calls) -> Work:
    return calls["elements"], calls["bytes_read"] + calls["bytes_written"]


def _rowwise(calls: Calls) -> Work:
    elements = calls["rows"] * calls["cols"]
    return elements, 2.0 * elements * calls.item_bytes()


def _embedding(calls: Calls) -> Work:
    """A sum of every element looked up; rows as they are asked for, once more where they are written back."""
    written = np.where(np.array(["backward" in kind for kind in calls.family.kinds])[calls.kind], 2.0, 1.0)
    pooled = calls["batch"] * calls["columns"] * calls["row_item_bytes"]
    return calls["row_bytes"] / np.maximum(calls["row_item_bytes"], 1.0), written * calls["row_bytes"] + pooled


_WORK: dict[str, Callable[[Calls], Work]] = {
    "gemm": _gemm, "conv": _conv, "attention": _attention, "embedding": _embedding,
    "softmax": _rowwise, "norm": _rowwise,
    "elementwise": _streaming, "reduction": _streaming, "pool": _streaming, "index": _streaming,
}  # fmt: skip

"""What kernel calls have to do, whatever the device: operations, and bytes that must move at least once.

GEMMs, convolutions and attention count the operations of model FLOPs utilisation; streaming kernels count one operation
an element, since what they do with it hardly matters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.conv.physics import Geometry
from traincast.costs.kernels.gemm import GEMM
from traincast.utils.arrays import FloatArray

COUNTED_FLOPS = "counted_flops"
"""The field of calls whose operations were counted when they were lowered."""
# a product of scores and one with values, two operations each; backwards twice as many, the scores that fused kernels
# compute again are not counted (Chowdhery et al., PaLM, appendix B)
_ATTENTION_FLOPS = {"forward": 4.0, "backward": 8.0}
Work = tuple[FloatArray, FloatArray]
"""Operations and bytes of every call."""


def count_flops(calls: Calls) -> FloatArray:
    """Operations of every call (a multiplication and its addition are two); 0 for families that only move data. Calls
    of a measured CPU carry theirs."""
    if COUNTED_FLOPS in calls.family.fields:
        return calls[COUNTED_FLOPS]
    count = _COUNTED.get(calls.family.name)
    return np.zeros(len(calls)) if count is None else np.asarray(count(calls))


def _count_gemm_flops(calls: Calls) -> FloatArray:
    return np.asarray(2.0 * np.maximum(calls["batch"], 1.0) * calls["m"] * calls["n"] * calls["k"])


def _count_conv_flops(calls: Calls) -> FloatArray:
    """The same number forwards and for either gradient: every pair of an output and an input of its window meets."""
    return Geometry.of(calls).flops


def _count_attention_flops(calls: Calls) -> FloatArray:
    """A causal mask skips half of the pairs."""
    per_pair = np.array([_ATTENTION_FLOPS[kind.rpartition("_")[2]] for kind in calls.family.kinds])[calls.kind]
    pairs = calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * (1.0 - 0.5 * calls["causal"])
    return np.asarray(per_pair * pairs * calls["head_dim"])


_COUNTED: dict[str, Callable[[Calls], FloatArray]] = {
    GEMM.name: _count_gemm_flops,
    CONV.name: _count_conv_flops,
    ATTENTION.name: _count_attention_flops,
}


def count_work(calls: Calls) -> Work | None:
    """Operations and bytes of calls of one family; None where there is no arithmetic (transfers, collectives)."""
    function = _WORK.get(calls.family.name)
    return None if function is None else function(calls)


def _count_gemm_work(calls: Calls) -> Work:
    batch, m, n, k = (calls[name] for name in ("batch", "m", "n", "k"))
    return count_flops(calls), batch * (m * k + k * n + m * n) * calls.item_bytes()


def _count_conv_work(calls: Calls) -> Work:
    return count_flops(calls), Geometry.of(calls).total_size * calls.item_bytes()


def _count_attention_work(calls: Calls) -> Work:
    rows = calls["batch"] * (calls["q_heads"] * calls["q_len"] + calls["kv_heads"] * calls["kv_len"])
    passes = np.where(calls.is_kind("backward", "efficient_backward"), 4.0, 2.0)
    return count_flops(calls), passes * rows * calls["head_dim"] * calls.item_bytes()


def _count_streaming_work(calls: Calls) -> Work:
    return calls["elements"], calls["bytes_read"] + calls["bytes_written"]


def _count_rowwise_work(calls: Calls) -> Work:
    elements = calls["rows"] * calls["cols"]
    return elements, 2.0 * elements * calls.item_bytes()


def _count_embedding_work(calls: Calls) -> Work:
    """A sum of every element looked up; rows as they are asked for, once more where they are written back."""
    written = np.where(np.array(["backward" in kind for kind in calls.family.kinds])[calls.kind], 2.0, 1.0)
    pooled = calls["batch"] * calls["columns"] * calls["row_item_bytes"]
    return calls["row_bytes"] / np.maximum(calls["row_item_bytes"], 1.0), written * calls["row_bytes"] + pooled


_WORK: dict[str, Callable[[Calls], Work]] = {
    "gemm": _count_gemm_work,
    "conv": _count_conv_work,
    "attention": _count_attention_work,
    "embedding": _count_embedding_work,
    "softmax": _count_rowwise_work,
    "norm": _count_rowwise_work,
    "elementwise": _count_streaming_work,
    "reduction": _count_streaming_work,
    "pool": _count_streaming_work,
    "index": _count_streaming_work,
}

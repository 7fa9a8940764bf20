"""The arithmetic that model FLOPs utilisation counts: matrix products, convolutions and attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.conv.roofline import output_positions
from traincast.costs.kernels.gemm import GEMM
from traincast.utils.arrays import FloatArray

COUNTED_FLOPS = "counted_flops"
"""The field of calls whose operations were counted when they were lowered."""
# a product of scores and one with values, two operations each; backwards twice as many, the scores that fused kernels
# compute again are not counted (Chowdhery et al., PaLM, appendix B)
_ATTENTION_FLOPS = {"forward": 4.0, "backward": 8.0}


def counted_flops(calls: Calls) -> FloatArray:
    """Operations of every call (a multiplication and its addition are two); 0 for families that only move data. Calls
    of a measured CPU carry theirs."""
    if COUNTED_FLOPS in calls.family.fields:
        return calls[COUNTED_FLOPS]
    count = _COUNTED.get(calls.family.name)
    return np.zeros(len(calls)) if count is None else np.asarray(count(calls))


def _product(calls: Calls) -> FloatArray:
    return np.asarray(2.0 * np.maximum(calls["batch"], 1.0) * calls["m"] * calls["n"] * calls["k"])


def _convolution(calls: Calls) -> FloatArray:
    """The same number forwards and for either gradient: every pair of an output and an input of its window meets."""
    positions = calls["batch"] * output_positions(calls)
    window = calls["kernel_h"] * calls["kernel_w"] * calls["in_channels"] / calls["groups"]
    return np.asarray(2.0 * positions * calls["out_channels"] * window)


def _attention(calls: Calls) -> FloatArray:
    """A causal mask skips half of the pairs."""
    per_pair = np.array([_ATTENTION_FLOPS[kind.rpartition("_")[2]] for kind in calls.family.kinds])[calls.kind]
    pairs = calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * (1.0 - 0.5 * calls["causal"])
    return np.asarray(per_pair * pairs * calls["head_dim"])


_COUNTED: dict[str, Callable[[Calls], FloatArray]] = {
    GEMM.name: _product,
    CONV.name: _convolution,
    ATTENTION.name: _attention,
}

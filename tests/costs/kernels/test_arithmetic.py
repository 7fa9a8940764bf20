"""Operations of calls, counted by hand."""

from __future__ import annotations

import pytest

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.streaming import MEMCPY
from traincast.costs.kernels.work import counted_flops


def flops(family, kind, **sizes):
    return float(counted_flops(Calls.of(family, [family.call(kind, "fp32", **sizes)]))[0])


@pytest.mark.parametrize(("kind", "batch"), [("mm", 1), ("bmm", 6), ("looped", 4), ("grouped", 4)])
def test_a_product(kind, batch):
    assert flops(GEMM, kind, batch=batch, m=3, n=5, k=7, trans_a=0, trans_b=0, bias=1) == batch * 2 * 3 * 5 * 7


@pytest.mark.parametrize("kind", ["forward", "backward_data", "backward_weights"])
def test_a_convolution_of_either_direction(kind):
    window = {
        "kernel_h": 3,
        "kernel_w": 3,
        "stride_h": 2,
        "stride_w": 1,
        "pad_h": 1,
        "pad_w": 0,
        "dilation_h": 1,
        "dilation_w": 2,
    }
    sizes = {"batch": 2, "in_channels": 8, "out_channels": 12, "in_h": 9, "in_w": 11, "groups": 4, "channels_last": 0}

    # 5 x 7 positions, 3 x 3 x 2 inputs each
    assert flops(CONV, kind, **window, **sizes) == 2 * (2 * 5 * 7 * 12) * (3 * 3 * 2)


@pytest.mark.parametrize(("kind", "causal", "per_pair"), [("forward", 0, 4), ("backward", 0, 8), ("forward", 1, 2)])
def test_attention(kind, causal, per_pair):
    sizes = {"batch": 2, "q_heads": 6, "kv_heads": 3, "q_len": 10, "kv_len": 20, "head_dim": 64}

    assert flops(ATTENTION, kind, causal=causal, **sizes) == per_pair * 2 * 6 * 10 * 20 * 64


def test_a_copy_computes_nothing():
    assert flops(MEMCPY, "d2d", bytes=100) == 0.0

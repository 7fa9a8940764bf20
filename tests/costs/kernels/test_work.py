"""Operations and bytes of calls, worked out by hand."""

from __future__ import annotations

import pytest

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.cost import count_flops, count_work
from traincast.costs.kernels.families import BY_NAME
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.streaming import MEMCPY


def one(family, kind, compute="fp32", **sizes):
    record = BY_NAME[family].family
    filled = dict.fromkeys(record.fields, 0.0) | sizes
    return Calls.of(record, [record.call(kind, compute, **filled)])


@pytest.mark.parametrize(
    ("calls", "operations", "nbytes"),
    [
        (one("gemm", "mm", batch=2, m=3, n=5, k=7), 2 * 2 * 3 * 5 * 7, 4 * 2 * (21 + 35 + 15)),
        (one("gemm", "mm", "bf16", batch=1, m=4, n=4, k=4), 128, 2 * 48),
        (one("elementwise", "add", elements=10, bytes_read=80, bytes_written=40), 10, 120),
        (one("softmax", "forward", rows=3, cols=4), 12, 96),
        # 3 x 3 window over 4 x 4 pixels with a border: 16 positions of 2 channels into 5
        (one("conv", "forward", batch=1, in_channels=2, out_channels=5, in_h=4, in_w=4, kernel_h=3, kernel_w=3,
             stride_h=1, stride_w=1, pad_h=1, pad_w=1, dilation_h=1, dilation_w=1, groups=1),
         2 * 16 * 90, 4 * (32 + 80 + 90)),
        # a causal mask leaves half of 8 x 8 pairs; two GEMMs of 16 columns
        (one("attention", "forward", batch=1, q_heads=1, kv_heads=1, q_len=8, kv_len=8, head_dim=16, causal=1),
         32 * 16 * 4, 2 * 16 * 16 * 4),
        (one("embedding", "tbe_forward", batch=2, columns=4, row_bytes=160, row_item_bytes=4), 40, 160 + 32),
        (one("embedding", "tbe_backward_sgd", batch=2, columns=4, row_bytes=160, row_item_bytes=4), 40, 320 + 32),
    ],
)  # fmt: skip
def test_work_by_hand(calls, operations, nbytes):
    done = count_work(calls)

    assert done[0].tolist() == [operations]
    assert done[1].tolist() == [nbytes]


@pytest.mark.parametrize("family", ["memcpy", "collective", "copy"])
def test_what_only_moves_data_has_none(family):
    record = BY_NAME[family].family

    assert count_work(Calls.of(record, [])) is None


def flops(family, kind, **sizes):
    return float(count_flops(Calls.of(family, [family.call(kind, "fp32", **sizes)]))[0])


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
    sizes = {
        "batch": 2,
        "in_channels": 8,
        "out_channels": 12,
        "in_h": 9,
        "in_w": 11,
        "groups": 4,
        "channels_last": 0,
        "direct": 0,
        "searched": 1,
        "slowness": 1,
        "winograd": 1,
    }

    # 5 x 7 positions, 3 x 3 x 2 inputs each
    assert flops(CONV, kind, **window, **sizes) == 2 * (2 * 5 * 7 * 12) * (3 * 3 * 2)


@pytest.mark.parametrize(("kind", "causal", "per_pair"), [("forward", 0, 4), ("backward", 0, 8), ("forward", 1, 2)])
def test_attention(kind, causal, per_pair):
    sizes = {"batch": 2, "q_heads": 6, "kv_heads": 3, "q_len": 10, "kv_len": 20, "head_dim": 64}

    assert flops(ATTENTION, kind, causal=causal, **sizes) == per_pair * 2 * 6 * 10 * 20 * 64


def test_a_copy_computes_nothing():
    assert flops(MEMCPY, "d2d", bytes=100) == 0.0

"""Operations and bytes of calls, worked out by hand."""

from __future__ import annotations

import pytest

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.families import BY_NAME
from traincast.costs.kernels.work import work


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
        # a causal mask leaves half of 8 x 8 pairs; two products of 16 columns
        (one("attention", "forward", batch=1, q_heads=1, kv_heads=1, q_len=8, kv_len=8, head_dim=16, causal=1),
         32 * 16 * 4, 2 * 16 * 16 * 4),
        (one("embedding", "tbe_forward", batch=2, columns=4, row_bytes=160, row_item_bytes=4), 40, 160 + 32),
        (one("embedding", "tbe_backward_sgd", batch=2, columns=4, row_bytes=160, row_item_bytes=4), 40, 320 + 32),
    ],
)  # fmt: skip
def test_work_by_hand(calls, operations, nbytes):
    done = work(calls)

    assert done[0].tolist() == [operations]
    assert done[1].tolist() == [nbytes]


@pytest.mark.parametrize("family", ["memcpy", "collective", "copy"])
def test_what_only_moves_data_has_none(family):
    record = BY_NAME[family].family

    assert work(Calls.of(record, [])) is None

"""Softmax of rows that do not fit PyTorch's vectors."""

from __future__ import annotations

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.rowwise import SOFTMAX
from traincast.hardware.catalog import load_device


def seconds(cols, compute):
    call = SOFTMAX.call("forward", compute, rows=20_000, cols=cols)
    estimate, _ = price_calls(Calls.of(SOFTMAX, [call]), load_device("h100"))
    return float(estimate.seconds[0])


def test_two_bytes_take_as_long_as_four_where_vectors_do_not_fit_the_row():
    assert seconds(5185, "bf16") == seconds(5185, "fp32")
    assert seconds(5184, "bf16") < 0.8 * seconds(5184, "fp32")


def test_short_rows_are_kept_by_a_warp_whatever_their_length():
    assert seconds(1021, "bf16") < seconds(1021, "fp32")

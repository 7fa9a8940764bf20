"""Softmax of rows that do not fit PyTorch's vectors."""

from __future__ import annotations

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.rowwise import SOFTMAX
from traincast.hardware.platform import load_device


def seconds(cols, compute):
    call = SOFTMAX.call("forward", compute, rows=20_000, cols=cols)
    estimate, _ = price_calls(Calls.of(SOFTMAX, [call]), load_device("h100"))
    return float(estimate.seconds[0])


def test_two_bytes_take_longer_than_four_where_vectors_do_not_fit_the_row():
    """A block goes through the row element by element: all rows that need as many rounds take as long."""
    assert seconds(5185, "bf16") > 1.2 * seconds(5185, "fp32")
    assert seconds(5184, "bf16") < 0.8 * seconds(5184, "fp32")
    assert seconds(5125, "bf16") == seconds(6143, "bf16") < seconds(6145, "bf16")


def test_rows_of_two_traces_on_h100():
    """2.19 and 5.72 ms measured; both were in view when the two constants were set."""
    for rows, cols, measured in ((16 * 5185, 5185, 2.187e-3), (96 * 3137, 3137, 5.724e-3)):
        call = SOFTMAX.call("forward", "bf16", rows=rows, cols=cols)
        estimate, _ = price_calls(Calls.of(SOFTMAX, [call]), load_device("h100"))
        assert abs(float(estimate.seconds[0]) / measured - 1) < 0.03


def test_short_rows_are_kept_by_a_warp_whatever_their_length():
    assert seconds(1021, "bf16") < seconds(1021, "fp32")


def price(key, kind, cols, compute):
    """Seconds of 8,192 rows on a device."""
    call = SOFTMAX.call(kind, compute, rows=8192, cols=cols)
    return float(price_calls(Calls.of(SOFTMAX, [call]), load_device(key))[0].seconds[0])


def test_a_card_with_little_memory_rate_for_its_sms_does_not_notice():
    """Ampere for graphics waits for its memory, whatever the width of loads."""
    assert price("rtx-a6000", "forward", 267_735, "fp16") < 1.05 * price("rtx-a6000", "forward", 267_736, "fp16")


def test_rows_that_no_warp_keeps_are_read_as_often_in_either_pass():
    for cols, ratio in ((1000, 1.5), (50_000, 1.0)):
        forward, backward = (price("a100-40gb", kind, cols, "fp32") for kind in ("log_forward", "log_backward"))
        assert abs(backward / forward - ratio) < 1e-6

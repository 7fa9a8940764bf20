"""The backward of fused attention, and what a generation changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.costs.kernels.attention.test_model import attention, predict
from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.attention.physics import (
    BACKWARD_FEATURES,
    choose_attention_kernel,
    compute_attention_backward_features,
    get_exponential_rate,
)
from traincast.costs.kernels.contract import Calls
from traincast.hardware import load_device


def test_features_count_tiles_by_hand():
    device = load_device("b200")
    call = attention(batch=1, heads=148, length=256, dim=128, kind="backward")
    features = dict(
        zip(BACKWARD_FEATURES, compute_attention_backward_features(Calls.of(ATTENTION, [call]), device)[0], strict=True)
    )
    turn = 10 * 128 * 128 * 128 / (2250e12 / 148)
    # 148 heads x 2 blocks of keys on 148 SMs, 1.5 of 2 tiles of queries each under the mask
    assert features["products"] == pytest.approx(2 * 1.5 * turn)
    assert features["longest block"] == pytest.approx(2 * turn)
    assert features["heads beyond 128"] == 0.0
    wide = attention(batch=1, heads=148, length=256, dim=192, kind="backward")
    assert compute_attention_backward_features(Calls.of(ATTENTION, [wide]), device)[0, 4] == pytest.approx(
        2 * 1.5 * 1.5 * turn
    )


@pytest.mark.parametrize("key", ["b200", "gb200", "gb300"])
def test_longer_and_wider_takes_longer_on_blackwell(key):
    lengths = predict(key, *(attention(length=2**i, kind="backward") for i in range(7, 18))).seconds
    assert (np.diff(lengths) > 0).all()
    narrow, wide = predict(key, attention(dim=128, kind="backward"), attention(dim=192, kind="backward")).seconds
    assert wide > 1.4 * narrow


def test_before_hopper_it_is_a_multiple_of_the_forward_and_says_so():
    forward = predict("a100-80gb", attention())
    backward = predict("a100-80gb", attention(kind="backward"))
    assert backward.seconds[0] == pytest.approx(2.8 * forward.seconds[0])
    assert backward.sigma[0] > forward.sigma[0] + 0.2
    assert predict("h100", attention(kind="backward")).sigma[0] < backward.sigma[0]


def test_hopper_s_backward_grows_faster_with_length_and_head_size_than_its_forward():
    def ratio(length, dim):
        calls = (attention(2, 16, length, dim, kind=kind) for kind in ("backward", "forward"))
        return np.divide(*predict("h100", *calls).seconds)

    assert ratio(2048, 128) < ratio(8192, 128) < ratio(32768, 128)
    assert ratio(8192, 64) < ratio(8192, 128) < ratio(8192, 256)


def test_few_heads_keep_the_backward_busier_than_the_forward():
    few = [predict("b200", attention(1, 8, 4096, kind=kind)).seconds[0] for kind in ("forward", "backward")]
    many = [predict("b200", attention(1, 128, 4096, kind=kind)).seconds[0] for kind in ("forward", "backward")]
    assert few[1] / few[0] < 2.3 < many[1] / many[0]


def test_a_generation_decides_kernel_and_exponentials():
    keys = ("h100", "b200", "gb300", "rtx-pro-6000", "a100-80gb", "mi355x")
    kernels = [choose_attention_kernel(load_device(key)) for key in keys]
    assert kernels == ["flash3", "tensorrt", "tensorrt", "flash2", "flash2", "flash2"]
    b300, b200 = load_device("b300"), load_device("b200")
    assert get_exponential_rate(b300) == 2 * get_exponential_rate(replace(b300, compute_capability=10.0))
    assert get_exponential_rate(load_device("rtx-pro-6000")) == 16e6 * load_device("rtx-pro-6000").effective_clock_mhz
    assert get_exponential_rate(b200) == 16e6 * 1965

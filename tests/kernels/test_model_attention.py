"""Fused attention."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.model_checks import check_contract
from traincast.kernels.call import Calls
from traincast.kernels.families import ATTENTION
from traincast.kernels.models.shipped import shipped_models
from traincast.platform import device_keys, load_device


def attention(batch=4, heads=16, length=2048, dim=128, kind="forward", compute="bf16", causal=1, kv_heads=None):
    return ATTENTION.call(
        kind, compute, batch=batch, q_heads=heads, kv_heads=kv_heads or heads, q_len=length, kv_len=length,
        head_dim=dim, causal=causal,
    )  # fmt: skip


def predict(key, *calls):
    return shipped_models()["attention"].predict(Calls.of(ATTENTION, calls), load_device(key))


@pytest.mark.parametrize("key", device_keys())
@pytest.mark.parametrize("compute", ["fp32", "fp16", "bf16"])
def test_contract_on_every_device_and_type(key, compute):
    calls = [
        attention(batch, heads, length, dim, kind, compute, causal)
        for batch in (1, 64) for heads in (1, 12) for length in (1, 100, 8192) for dim in (32, 128)
        for kind in ATTENTION.kinds for causal in (0, 1)
    ]  # fmt: skip
    check_contract(shipped_models()["attention"], Calls.of(ATTENTION, calls), load_device(key))


@pytest.mark.parametrize("key", ["a100-80gb", "h100", "b200", "v100"])
def test_longer_sequences_and_larger_batches_take_longer(key):
    assert (np.diff(predict(key, *(attention(length=2**i) for i in range(4, 15))).seconds) >= 0).all()
    assert (np.diff(predict(key, *(attention(batch=2**i) for i in range(9))).seconds) >= 0).all()


@pytest.mark.parametrize(("key", "least"), [("a100-80gb", 0.4), ("h100", 0.35), ("b200", 0.3)])
def test_long_sequences_use_a_good_share_of_the_tensor_cores_and_not_more_than_all(key, least):
    batch, heads, length, dim = 8, 32, 16384, 128
    flops = 2 * batch * heads * length * length * dim
    share = flops / predict(key, attention(batch, heads, length, dim)).seconds[0] / load_device(key).peak("bf16")
    assert least < share < 1.0


def test_backward_full_and_fp32_attention_cost_more_and_are_out_of_domain():
    measured, backward, full, plain = (
        predict("a100-80gb", attention(**change))
        for change in ({}, {"kind": "backward"}, {"causal": 0}, {"compute": "fp32"})
    )
    assert measured.in_domain[0]
    for derived, ratio in ((backward, 2.0), (full, 1.4), (plain, 4.0)):
        assert derived.seconds[0] > ratio * measured.seconds[0]
        assert not derived.in_domain[0]
        assert derived.sigma[0] > measured.sigma[0]


def test_accuracy_on_shapes_not_fitted(shared_data):
    from traincast.evaluate.kernels_attention import evaluate_attention

    for row in evaluate_attention(shared_data):
        assert row.gmae < (11.0 if "shapes never seen" in row.suite else 35.0), row

"""Fused attention."""

from __future__ import annotations

import numpy as np
import pytest

from tests.costs.kernels.model_checks import check_contract
from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.attention.physics import (
    FEATURES,
    KERNELS,
    choose_attention_kernel,
    compute_attention_features,
)
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.families import load_shipped_model
from traincast.hardware import list_device_keys, load_device


def attention(batch=4, heads=16, length=2048, dim=128, kind="forward", compute="bf16", causal=1, kv_heads=None):
    return ATTENTION.call(
        kind, compute, batch=batch, q_heads=heads, kv_heads=kv_heads or heads, q_len=length, kv_len=length,
        head_dim=dim, causal=causal,
    )  # fmt: skip


def predict(key, *calls):
    return load_shipped_model("attention").predict(Calls.of(ATTENTION, calls), load_device(key))


@pytest.mark.parametrize("key", list_device_keys())
@pytest.mark.parametrize("compute", ["fp32", "fp16", "bf16"])
def test_contract_on_every_device_and_type(key, compute):
    calls = [
        attention(batch, heads, length, dim, kind, compute, causal)
        for batch in (1, 64) for heads in (1, 12) for length in (1, 100, 8192) for dim in (32, 128)
        for kind in ATTENTION.kinds for causal in (0, 1)
    ]  # fmt: skip
    check_contract(load_shipped_model("attention"), Calls.of(ATTENTION, calls), load_device(key))


@pytest.mark.parametrize("key", ["a100-80gb", "h100", "b200", "v100"])
def test_longer_sequences_and_larger_batches_take_longer(key):
    assert (np.diff(predict(key, *(attention(length=2**i) for i in range(4, 15))).seconds) >= 0).all()
    assert (np.diff(predict(key, *(attention(batch=2**i) for i in range(9))).seconds) >= 0).all()


@pytest.mark.parametrize(("key", "least"), [("a100-80gb", 0.4), ("h100", 0.35), ("b200", 0.25), ("l40s", 0.35)])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_long_sequences_use_a_good_share_of_the_tensor_cores_and_not_more_than_all(key, least, dim):
    batch, heads, length = 8, 32, 16384
    flops = 2 * batch * heads * length * length * dim
    share = (
        flops / predict(key, attention(batch, heads, length, dim)).seconds[0] / load_device(key).get_peak_flops("bf16")
    )
    assert least < share < 1.0, "also at head dimensions that were never measured on this card"


@pytest.mark.parametrize(("key", "dim"), [("a100-80gb", 128), ("l40s", 64), ("h100", 128), ("b200", 64)])
@pytest.mark.parametrize("length", [64, 512, 1024, 4096])
def test_a_causal_mask_spares_the_tiles_that_no_query_of_a_block_sees(key, dim, length):
    device = load_device(key)
    kernel = KERNELS[choose_attention_kernel(device)]
    size = sum(dim > limit for limit in kernel.dims)
    rows, step = int(kernel.queries[size]), int(kernel.keys[size])
    ends = [min(start + rows, length) for start in range(0, length, rows)]
    seen = np.mean([-(-end // step) for end in ends])

    calls = Calls.of(ATTENTION, [attention(dim=dim, length=length, causal=causal) for causal in (1, 0)])
    causal, full = compute_attention_features(calls, device)[:, FEATURES.index("GEMMs by waves")]

    assert causal / full == pytest.approx(seen / -(-length // step), rel=0.02)


def test_hopper_packs_the_heads_that_share_keys_into_one_block_and_ampere_does_not():
    for key, faster in (("h100", True), ("a100-80gb", False)):
        shared, own = predict(key, *(attention(256, 32, 16, kv_heads=heads) for heads in (1, 32))).seconds
        assert (shared < 0.5 * own) == faster


def test_far_beyond_the_measured_lengths_time_follows_the_square_and_says_so():
    for key in ("a100-80gb", "h100", "b200", "l40s"):
        inside, beyond = (predict(key, attention(1, 16, length)) for length in (16384, 163840))
        assert inside.in_domain[0]
        assert not beyond.in_domain[0]
        assert beyond.sigma[0] > inside.sigma[0]
        assert 90 < beyond.seconds[0] / inside.seconds[0] < 160


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

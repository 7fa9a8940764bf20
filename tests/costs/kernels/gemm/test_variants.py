"""Experts one after the other, sums onto gradients, groups in one kernel."""

from __future__ import annotations

import pytest

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.families import load_shipped_model
from traincast.costs.kernels.gemm import GEMM
from traincast.hardware import load_device


def product(kind="mm", batch=1, m=4096, n=4096, k=4096, compute="bf16"):
    return GEMM.call(kind, compute, batch=batch, m=m, n=n, k=k, trans_a=0, trans_b=1, bias=0)


def predict(*calls, key="b200"):
    return load_shipped_model("gemm").predict(Calls.of(GEMM, calls), load_device(key))


@pytest.mark.parametrize("key", ["b200", "h100", "v100"])
def test_a_loop_takes_as_long_as_its_turns(key):
    turn, loop = predict(product(m=256), product("looped", batch=32, m=256), key=key).seconds
    assert loop == pytest.approx(32 * turn)


def test_one_kernel_for_all_groups_is_no_slower_than_a_loop_of_small_ones():
    loop, grouped = predict(product("looped", batch=64, m=64), product("grouped", batch=64, m=64)).seconds
    assert grouped < loop


def test_a_gradient_in_fp32_costs_its_traffic():
    plain, onto = predict(product(k=16384), product("accumulate", k=16384)).seconds
    traffic = 8 * 4096 * 4096 / (0.82 * 8e12)
    assert onto == pytest.approx(plain + 0.4 * traffic)
    # few tokens an expert: the gradients decide
    loop = predict(product("looped_accumulate", batch=128, m=4096, n=7168, k=64)).seconds[0]
    assert loop > 128 * 8 * 4096 * 7168 / (0.82 * 8e12)


def test_variants_are_less_certain_and_plain_products_untouched():
    estimate = predict(product(), product("accumulate"), product("grouped"))
    assert estimate.sigma[1] > estimate.sigma[0]
    assert list(estimate.in_domain) == [True, True, False]

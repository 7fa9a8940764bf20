"""Experts one after the other, sums onto gradients, groups in one kernel."""

from __future__ import annotations

import numpy as np
import pytest
from traincast_evaluation.kernels.gemm.other_sources import evaluate_gemm_training, read_experts, read_products

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.families import shipped_model
from traincast.costs.kernels.gemm import GEMM
from traincast.hardware import load_device


def product(kind="mm", batch=1, m=4096, n=4096, k=4096, compute="bf16"):
    return GEMM.call(kind, compute, batch=batch, m=m, n=n, k=k, trans_a=0, trans_b=1, bias=0)


def predict(*calls, key="b200"):
    return shipped_model("gemm").predict(Calls.of(GEMM, calls), load_device(key))


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


def test_rows_of_the_training_benchmark(shared_data):
    products, experts = read_products(shared_data), read_experts(shared_data)
    assert (len(products), len(experts)) == (514, 108)
    assert 0.1 < products.held_out.mean() < 0.3
    # 2 m n k at a share of 2250 TFLOPS: no product is faster than the peak, none takes ten seconds
    flop = 2 * np.prod(products.calls.values[:, :4], axis=1)
    assert (flop / products.seconds < 2250e12).all()
    assert (flop / products.seconds > 1e14).all()
    assert set(np.array(GEMM.kinds)[experts.calls.kind]) == {"looped", "looped_accumulate"}


def test_training_runs_are_met_at_the_clock_they_hold(shared_data):
    rows = {row.group: row for row in evaluate_gemm_training(shared_data)}
    assert rows["b200 products, mm, shapes never seen"].gmae <= 7
    assert rows["b200 products, accumulate, shapes never seen"].gmae <= 7
    assert rows["b200 experts, looped, shapes seen"].gmae <= 9
    assert rows["b200 products, at the clock of kernels timed alone"].gmae >= 15

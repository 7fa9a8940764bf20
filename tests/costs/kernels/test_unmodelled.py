"""Ops without a model: the larger of bytes and flops, and a wider interval where flops cannot be known."""

from __future__ import annotations

import math

import pytest

from tests.costs.kernels.signatures import field, lowered, signature, tensor
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.unmodelled import classify_arithmetic, guess_contraction_flops
from traincast.hardware import load_device

M, N, K, STACK = 96, 160, 224, 7


@pytest.mark.parametrize(
    ("left", "right", "result", "products"),
    [
        ((M, K), (K, N), (M, N), 1),
        ((K, M), (N, K), (M, N), 1),
        ((STACK, M, K), (STACK, K, N), (STACK, M, N), STACK),
        ((STACK, M, K), (K, N), (STACK, M, N), STACK),
        ((STACK, 3, M, K), (STACK, 3, K, N), (STACK, 3, M, N), 3 * STACK),
    ],
)
def test_flops_of_a_product_follow_from_sizes_whichever_way_it_is_stored(left, right, result, products):
    op = signature("mylib::product", {"a": tensor(*left), "b": tensor(*right)}, tensor(*result))
    assert guess_contraction_flops(op) == pytest.approx(2 * products * M * N * K)


@pytest.mark.parametrize(
    ("inputs", "result"),
    [
        ([(M, N), (M, N)], (M, N)),
        ([(M, N), (N,)], (M, N)),
        ([(M, N)], (M,)),
        ([(M, M), (M, M)], (M, M)),
        ([(M, N), (M, N)], ()),
    ],
)
def test_what_shapes_do_not_show_is_no_product(inputs, result):
    op = signature("mylib::fancy", {f"x{i}": tensor(*shape) for i, shape in enumerate(inputs)}, tensor(*result))
    assert guess_contraction_flops(op) == 0


@pytest.mark.parametrize(
    ("name", "shape", "kind", "flops"),
    [
        ("aten::linalg_cholesky_ex", (4, 300, 300), "factorisation", 4 * 300**3 / 3),
        ("aten::_linalg_svd", (64, 64), "factorisation", 22 * 64**3),
        ("aten::linalg_inv_ex", (2, 64, 64), "factorisation", 2 * 2 * 64**3),
        ("aten::_fft_c2c", (8, 1024), "stream", 5 * 8 * 1024 * 10),
        ("aten::_standard_gamma", (8, 1024), "stream", 8 * 1024),
    ],
)
def test_pytorchs_own_ops_are_known_by_name(name, shape, kind, flops):
    op = signature(name, {"self": tensor(*shape)}, tensor(*shape))
    found_kind, found_flops = classify_arithmetic(op)
    assert found_kind == kind
    assert found_flops == pytest.approx(flops)


def test_distances_between_points_are_a_product():
    op = signature("aten::_cdist_forward", {"x1": tensor(M, K), "x2": tensor(N, K)}, tensor(M, N))
    assert classify_arithmetic(op) == ("product", pytest.approx(2 * M * N * K))


def test_a_convolution_counts_its_window():
    inputs = {"input": tensor(100, 8, 32), "weight": tensor(5, 32, 64)}
    kind, flops = classify_arithmetic(signature("aten::conv_tbc", inputs, tensor(96, 8, 64)))
    assert kind == "product"
    assert flops == 2 * (96 * 8 * 64) * (5 * 32)


def priced(items, device="a100-40gb"):
    (call,) = items
    estimate, _ = price_calls(Calls.of(call.family, [call]), load_device(device))
    return float(estimate.seconds[0]), float(estimate.sigma[0])


def test_a_compute_heavy_op_costs_its_flops_and_a_light_one_its_bytes():
    device = load_device("a100-40gb")
    half = {"dtype": "float16"}
    heavy = lowered(
        "mylib::product", {"a": tensor(8192, 4096, **half), "b": tensor(4096, 2048, **half)}, tensor(8192, 2048, **half)
    )
    needed = 2 * 8192 * 4096 * 2048 / device.get_peak_flops("fp16")
    assert needed < priced(heavy)[0] < 4 * needed
    light = lowered("aten::_standard_gamma", {"self": tensor(1 << 26)}, tensor(1 << 26))
    moved = (1 << 29) / device.dram_bandwidth
    assert moved < priced(light)[0] < 1.5 * moved


def test_arithmetic_that_cannot_be_known_has_a_wider_interval():
    (_, strangers), (_, pytorchs) = (
        priced(lowered(name, {"x": tensor(M, M)}, tensor(M, M))) for name in ("mylib::fancy", "aten::_standard_gamma")
    )
    assert strangers == pytest.approx(2 * pytorchs)
    assert math.exp(1.645 * strangers) > 9


def test_every_such_call_is_marked():
    for name in ("mylib::fancy", "aten::_standard_gamma", "aten::_cdist_forward"):
        (call,) = lowered(name, {"x1": tensor(M, K), "x2": tensor(N, K)}, tensor(M, N))
        assert call.estimated
        assert field(call, "bytes_read") == 4 * K * (M + N)

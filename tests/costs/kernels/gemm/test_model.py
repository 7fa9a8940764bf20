"""The GEMM model: physics it must keep, states it must survive, and accuracy on shapes no fit has seen."""

from __future__ import annotations

import numpy as np
import pytest

from tests.costs.kernels.model_checks import check_contract
from traincast.costs.kernels.contract import Calls, load_state
from traincast.costs.kernels.families import PROFILES, load_shipped_model
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.gemm.model import GemmModel, compute_clock_spread
from traincast.costs.kernels.gemm.physics import ENGINES, Problem, describe_gemm, get_engine_rate
from traincast.hardware import list_device_keys, load_device


@pytest.fixture(scope="module")
def model() -> GemmModel:
    return GemmModel.from_state(load_state(PROFILES / "gemm"))


def products(sizes, compute="fp32", kind="mm", trans_b=0) -> Calls:
    """Calls of shapes (batch, m, n, k)."""
    sizes = np.atleast_2d(np.asarray(sizes, dtype=np.float64))
    tail = np.tile([0.0, float(trans_b), 0.0], (len(sizes), 1))
    values = np.concatenate([sizes, tail], axis=1)
    return Calls.from_columns(GEMM, [kind] * len(sizes), [compute] * len(sizes), values)


def random_sizes(n, seed=0, most=8192):
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(0, np.log(most), (n, 4)))
    sizes[:, 0] = np.where(random.random(n) < 0.5, 1, np.minimum(sizes[:, 0], 512))
    return np.floor(sizes) + 0.0


@pytest.mark.parametrize("key", list_device_keys())
@pytest.mark.parametrize("compute", ["fp32", "tf32", "bf16", "fp16", "fp8"])
def test_contract_on_every_device_and_type(model, key, compute):
    check_contract(model, products(random_sizes(300), compute), load_device(key))


@pytest.mark.parametrize(
    ("key", "compute"), [("v100", "fp32"), ("h100", "fp32"), ("a100-80gb", "bf16"), ("b200", "fp8")]
)
def test_a_product_beyond_anything_measured_runs_near_but_never_above_the_peak(model, key, compute):
    device = load_device(key)
    size = 200_000.0
    estimate = model.predict(products([1, size, size, size], compute), device)
    reached = 2 * size**3 / estimate.seconds[0] / get_engine_rate(device, compute)
    assert (0.35 if compute == "fp8" else 0.5) < reached <= 1.0
    assert not estimate.in_domain[0]


@pytest.mark.parametrize("key", ["v100", "t4", "a100-40gb-pcie", "h100", "rtx-2080-ti"])
@pytest.mark.parametrize("dimension", [0, 1, 2, 3])
def test_twice_the_work_is_hardly_ever_faster(model, key, dimension):
    sizes = random_sizes(2000, seed=dimension)
    doubled = sizes.copy()
    doubled[:, dimension] *= 2
    device = load_device(key)
    ratio = model.predict(products(doubled), device).seconds / model.predict(products(sizes), device).seconds
    assert np.median(ratio) >= 1.0
    assert np.mean(ratio > 0.8) > 0.95


def test_a_locked_clock_slows_arithmetic_but_not_memory(model):
    def slowdown(key, sizes, compute):
        device = load_device(key)
        locked = device.with_clock(device.boost_clock_mhz / 2)
        calls = products(sizes, compute, trans_b=1)
        return model.predict(calls, locked).seconds[0] / model.predict(calls, device).seconds[0]

    assert slowdown("v100", [1, 8192, 8192, 8192], "fp32") == pytest.approx(2.0, rel=0.1)
    assert slowdown("a100-80gb", [1, 16, 16384, 16384], "bf16") < 1.2


def test_a_power_limited_card_does_not_reach_its_boost_clock(model):
    t4 = load_device("t4")
    seconds = model.predict(products([1, 4096, 4096, 4096], kind="linear", trans_b=1), t4).seconds[0]
    assert 2 * 4096**3 / seconds < 0.6 * t4.get_peak_flops("fp32")


def physical_seconds(device, *sizes):
    return describe_gemm(ENGINES["simt"], Problem.of(products(list(sizes)), device, "fp32", 4.0))[0][0]


def test_the_power_limit_spares_short_kernels_and_makes_long_ones_pay_for_their_traffic_too():
    t4 = load_device("t4")
    boost, sustained = (t4.with_clock(clock) for clock in (t4.boost_clock_mhz, t4.sustained_clock_mhz))
    short, long_ = (16, 128, 128, 512), (8192, 512, 512, 64)
    assert physical_seconds(t4, *short) < 1.15 * physical_seconds(boost, *short)
    assert physical_seconds(t4, *long_) > 1.1 * physical_seconds(sustained, *long_)


def test_a_floating_clock_widens_the_interval_and_a_locked_one_does_not(model):
    t4, calls = load_device("t4"), products([1, 4096, 4096, 4096], kind="linear", trans_b=1)
    floating, locked = (model.predict(calls, device).sigma[0] for device in (t4, t4.with_clock(t4.sustained_clock_mhz)))
    assert compute_clock_spread(t4) == pytest.approx(np.log(1590 / 820) / np.sqrt(12))
    assert compute_clock_spread(t4.with_clock(820)) == 0.0
    assert compute_clock_spread(load_device("v100")) == 0.0
    assert floating > locked


def test_narrower_types_are_faster_when_arithmetic_binds(model):
    h100 = load_device("h100")
    types = ("fp8", "bf16", "tf32", "fp32")
    seconds = [model.predict(products([1, 8192, 8192, 8192], compute), h100).seconds[0] for compute in types]
    assert seconds == sorted(seconds)


def test_tensor_cores_do_not_care_how_operands_are_stored(model):
    as_is, transposed = (products([1, 4096, 4096, 4096], "bf16", trans_b=t) for t in (0, 1))
    h100 = load_device("h100")
    assert model.predict(as_is, h100).seconds == model.predict(transposed, h100).seconds


def test_a_chip_never_measured_gets_a_wider_interval_and_says_so(model):
    for trans_b, wider in ((1, 1.3), (0, 1.0)):
        calls = products([1, 4096, 4096, 4096], trans_b=trans_b)
        known, unknown = (model.predict(calls, load_device(key)) for key in ("v100", "a40"))
        assert known.in_domain[0]
        assert not unknown.in_domain[0]
        assert unknown.sigma[0] >= wider * known.sigma[0]


def test_a_card_with_a_measured_chip_is_known(model):
    assert model.predict(products([1, 4096, 4096, 4096]), load_device("v100-32gb")).in_domain[0]


def test_sizes_outside_the_measured_ones_are_flagged_and_widen_the_interval(model):
    v100 = load_device("v100")
    estimate = model.predict(products([[1, 4096, 4096, 4096], [1, 4096, 4096, 4096 * 256]], trans_b=1), v100)
    assert estimate.in_domain.tolist() == [True, False]
    assert estimate.sigma[1] > estimate.sigma[0]


def test_physics_counts_tiles_in_whole_waves():
    v100 = load_device("v100")  # 80 SMs: the 81st block runs alone
    full, over = (
        describe_gemm(ENGINES["simt"], Problem.of(products([blocks, 128, 128, 4096]), v100, "fp32", 4.0))[0][0]
        for blocks in (80, 81)
    )
    assert over > 1.2 * full


@pytest.mark.parametrize("key", ["p100", "p4", "t4", "v100", "a100-40gb-pcie"])
def test_a_linear_layer_whose_sizes_divide_is_no_faster_than_the_fastest_measured(model, key):
    device, fit = load_device(key), model.engines_["simt"]
    best = fit.ceiling[fit.chips.find(device)] * get_engine_rate(device, "fp32")
    assert np.isfinite(best)
    sizes = np.array([[1, m, n, k] for m in (2048, 8192, 65536) for n in (1280, 5120) for k in (1280, 5120)])
    took = model.predict(products(sizes, trans_b=1), device).seconds
    assert (2 * sizes.prod(axis=1) / took <= best).all()


def test_batches_have_no_ceiling_since_they_were_measured_small(model):
    p100, fit = load_device("p100"), model.engines_["simt"]
    sizes = np.array([[64, 1024, 1024, 1024]])
    took = model.predict(products(sizes, kind="bmm"), p100).seconds
    assert 2 * sizes.prod() / took[0] > fit.ceiling[fit.chips.find(p100)] * get_engine_rate(p100, "fp32")


@pytest.mark.parametrize(
    ("compute", "n", "k", "slow"),
    [
        ("tf32", 9375, 512, True), ("tf32", 19410, 256, True), ("tf32", 4864, 2048, False), ("bf16", 1028, 1024, True),
        ("bf16", 1032, 1024, False), ("fp32", 9375, 512, False), ("bf16", 1, 1024, False),
    ],
)  # fmt: skip
def test_rows_that_do_not_start_at_16_bytes_starve_tensor_cores(model, compute, n, k, slow):
    a100 = load_device("a100-80gb")
    here, aligned = model.predict(products([[1, 1024, n, k], [1, 1024, -(-n // 8) * 8, k]], compute), a100).seconds
    assert (here > 1.5 * aligned) == slow


def test_unaligned_products_bound_by_memory_take_no_longer(model):
    a100 = load_device("a100-80gb")
    here, aligned = model.predict(products([[1, 98304, 647, 16], [1, 98304, 648, 16]], "tf32"), a100).seconds
    assert here == pytest.approx(aligned, rel=0.05)


def test_volta_does_not_split_half_precision_products_of_unaligned_rows():
    # Given the weight gradient of 13 features and one of 16, over many samples
    calls = Calls.of(
        GEMM,
        [
            GEMM.call("mm", "fp16", batch=1, m=512, n=n, k=k, trans_a=1, trans_b=0, bias=0)
            for n, k in ((13, 65536), (16, 65536), (13, 32768))
        ],
    )
    odd, even, half = load_shipped_model("gemm").predict(calls, load_device("v100")).seconds

    # then on Volta the first is done by the cores, a few blocks that walk the whole contraction
    assert odd > 5 * even
    assert odd / half == pytest.approx(2.0, rel=0.05)
    # and on Ampere by tensor cores
    odd, even, _ = load_shipped_model("gemm").predict(calls, load_device("a100-40gb")).seconds
    assert odd < 3 * even

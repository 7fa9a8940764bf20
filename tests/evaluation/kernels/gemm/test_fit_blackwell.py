"""Devices and types that were measured after the networks were trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.families import load_shipped_model
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.gemm.model import estimate_engine_seconds
from traincast.costs.kernels.gemm.physics import ENGINES, choose_engine
from traincast.hardware import load_device
from traincast_evaluation.kernels.gemm.fit import TRAINED, without_later_devices
from traincast_evaluation.kernels.gemm.network import with_device

LATER = ("b300", "gb200", "gb300", "rtx-pro-6000")


@pytest.fixture(scope="module")
def model():
    return load_shipped_model("gemm")


def linear(n, compute="bf16", seed=0):
    random = np.random.default_rng(seed)
    sizes = 64 * np.ceil(np.exp(random.uniform(0, np.log(256), (n, 3))))
    values = np.column_stack([np.ones(n), sizes, np.zeros(n), np.ones(n), np.zeros(n)])
    return Calls.from_columns(GEMM, ["mm"] * n, [compute] * n, values)


@pytest.mark.parametrize(
    ("key", "compute", "engine"),
    [
        ("gb200", "bf16", "half"), ("gb200", "fp8", "fp8"), ("gb200", "fp8_block", "fp8_block"),
        ("gb200", "fp4", "fp4"),
        ("h100", "fp8_block", "fp8"), ("h100", "fp4", "simt"), ("rtx-pro-6000", "fp8", "fp8_graphics"),
        ("rtx-pro-6000", "fp4", "fp4"), ("v100", "fp8", "simt"), ("mi355x", "fp4", "amd"),
    ],
)  # fmt: skip
def test_which_units_compute_a_type(key, compute, engine):
    assert choose_engine(load_device(key), compute).name == engine


def test_later_devices_are_behind_those_the_networks_were_trained_on(model):
    for name in ("half", "fp8"):
        fit = model.engines_[name]
        later = fit.chips.keys[fit.trained :]
        assert set(later) <= set(LATER)
        assert not set(fit.chips.keys[: fit.trained]) & set(LATER)
        assert len(fit.sigma) == len(fit.chips.keys) + 2
        assert all(len(net.codes) == len(fit.chips.keys) for net in fit.nets)
    assert set(TRAINED) <= set(model.engines_)


@pytest.mark.parametrize("key", ["b200", "h100", "a100-80gb", "h100-pcie", "l40s"])
@pytest.mark.parametrize("compute", ["bf16", "fp8"])
def test_devices_known_before_stay_as_they_were(model, key, compute):
    calls, device = linear(200, compute), load_device(key)
    now, before = model.predict(calls, device), without_later_devices(model).predict(calls, device)
    np.testing.assert_array_equal(now.seconds, before.seconds)
    np.testing.assert_array_equal(now.sigma, before.sigma)


@pytest.mark.parametrize("key", LATER)
def test_a_code_of_its_own_makes_a_device_known(model, key):
    calls, device = linear(50), load_device(key)
    assert model.predict(calls, device).in_domain.all()
    if key != "b300":  # carries the chip of B200
        assert not without_later_devices(model).predict(calls, device).in_domain.any()


def test_a_code_is_found_from_kernels_of_a_device(model):
    fit, engine = model.engines_["half"], ENGINES["half"]
    stranger = replace(load_device("l40s"), key="stranger")  # a card that shows what L40S would
    calls, fresh = linear(300, seed=3), linear(300, seed=4)
    shown = estimate_engine_seconds(engine, fit, calls, stranger, "bf16")
    found = with_device(fit, engine, calls, shown, stranger)
    assert found.chips.keys[-1] == "stranger"
    assert found.trained == fit.trained
    wanted = estimate_engine_seconds(engine, fit, fresh, stranger, "bf16")
    got = estimate_engine_seconds(engine, found, fresh, stranger, "bf16")
    assert np.median(np.abs(got / wanted - 1)) < 0.02
    np.testing.assert_array_equal(found.nets[0].codes[:-1], fit.nets[0].codes)
    np.testing.assert_array_equal(found.sigma[-2:], fit.sigma[-2:])


def test_narrow_types_are_faster_where_arithmetic_binds(model):
    big = np.array([[1, 8192, 8192, 8192, 0, 1, 0]], dtype=float)
    for key, types in (("gb200", ("bf16", "fp8", "fp4")), ("rtx-pro-6000", ("bf16", "fp8", "fp4"))):
        times = [
            model.predict(Calls.from_columns(GEMM, ["mm"], [name], big), load_device(key)).seconds[0] for name in types
        ]
        assert times[0] > times[1] > times[2]
        assert times[0] / times[2] < 8
    block = model.predict(Calls.from_columns(GEMM, ["mm"], ["fp8_block"], big), load_device("b200")).seconds[0]
    assert 2 * 8192**3 / 4500e12 < block < 1e-3

"""Predictions of whole steps: what must hold whatever the models say."""

from __future__ import annotations

import math

import pytest

import traincast
from traincast.hardware import list_platform_keys, load_platform
from traincast.models.catalog import list_models
from traincast.utils.metrics import Z90

MODELS = [info.name for info in list_models()]


@pytest.mark.parametrize(("number", "model"), enumerate(MODELS))
def test_every_built_in_is_predicted_and_every_platform_predicts_some(number, model):
    workload = traincast.load(model)
    keys = list_platform_keys()
    # every platform has two models, every model ten platforms
    for platform in [key for place, key in enumerate(keys) if (place - number) % len(MODELS) in (0, 11)]:
        result = traincast.predict(workload, on=platform)
        assert 0 < result.device_active <= result.iteration * (1 + 1e-9)
        assert result.interval[0] < result.iteration < result.interval[1]
        if model.startswith("dlrm"):
            assert result.estimated_ops == ()
        assert result.estimated_seconds < 0.02 * result.device_active


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["tf32", "fp16", "bf16"])
def test_lower_precision_is_not_slower_on_the_device(model, dtype):
    full = traincast.predict(model, on="a100-80gb", mode="inference")
    less = traincast.predict(model, on="a100-80gb", mode="inference", dtype=dtype)

    assert less.device_active < 1.02 * full.device_active


def test_more_samples_take_longer_on_the_device():
    active = [
        traincast.predict("dlrm-mlperf", on="v100", batch_size=batch).device_active for batch in (512, 2048, 8192)
    ]
    assert active == sorted(active)


def test_a_lower_clock_is_slower():
    fast, slow = (traincast.predict("resnet50", on="v100", clock_mhz=clock).iteration for clock in (1530, 765))
    assert 1.3 < slow / fast <= 2.0


def test_inference_is_a_part_of_training():
    training = traincast.predict("bert-large", on="a100-80gb", optimizer="none")
    inference = traincast.predict("bert-large", on="a100-80gb", mode="inference")

    assert 2 < training.device_active / inference.device_active < 4


def test_without_the_optimizer_the_step_is_shorter():
    whole = traincast.predict("bert-large", on="a100-80gb")
    without = traincast.predict("bert-large", on="a100-80gb", optimizer="none")

    assert "optimizer" in whole.by_phase
    assert "optimizer" not in without.by_phase
    assert without.iteration < whole.iteration


def test_host_bound_steps_follow_the_host():
    result = traincast.predict("dlrm-ddp", on="h100", batch_size=128)

    assert result.device_idle > result.device_active
    assert result.iteration == pytest.approx(result.host, rel=0.25)


def test_steps_that_run_into_each_other_are_device_bound_when_the_device_is_slower():
    result = traincast.predict("gpt2-large", on="p100")

    assert result.device_idle < 0.01 * result.iteration


def test_an_interval_is_made_of_named_terms():
    one = traincast.predict("dlrm-mlperf", on="a100-80gb", batch_size=512)
    several = traincast.predict("dlrm-mlperf", on="dgx-a100", gpus=2, batch_size=512)

    assert list(one.interval_terms) == ["kernels_and_host", "software_release"]
    assert list(several.interval_terms) == ["kernels_and_host", "software_release", "system_setup"]
    assert (one.interval_terms["software_release"], several.interval_terms["system_setup"]) == (0.04, 0.12)
    for result in (one, several):
        spread = math.hypot(*result.interval_terms.values())
        assert result.interval[1] / result.iteration == pytest.approx(math.exp(Z90 * spread))
        assert result.to_dict()["interval_terms"] == result.interval_terms


def test_a_host_that_is_nearly_late_makes_a_step_as_uncertain_as_one_that_is():
    near = traincast.predict("resnet50", on="a100-80gb", batch_size=14, dtype="tf32")
    far = traincast.predict("resnet50", on="a100-80gb", batch_size=256, dtype="tf32")
    assert near.device_idle < 0.2 * near.iteration, "the device still decides"
    spread = [step.interval_terms["kernels_and_host"] for step in (near, far)]
    assert spread[0] > 1.5 * spread[1], spread


@pytest.mark.parametrize(("platform", "told"), [("rtx-2080-ti", True), ("a100-80gb", False)])
def test_types_without_units_are_told(platform, told):
    step = traincast.predict("bert-large", on=platform, batch_size=2, dtype="bf16")
    assert any("has no units for bf16" in text for text in step.warnings) is told


def test_int8_has_the_rate_of_tensor_cores():
    device = load_platform("a100-80gb").device
    assert device.get_peak_flops("int8") == 2 * device.get_peak_flops("fp16")


@pytest.mark.parametrize(("key", "carried"), [("a100-80gb", False), ("rtx-a6000", True)])
def test_a_chip_that_nobody_measured_widens_the_interval(key, carried):
    result = traincast.predict("dlrm-default", on=key)
    assert ("new_chip" in result.interval_terms) == carried


def test_pcie_between_gpus_widens_the_interval_with_what_is_exposed():
    result = traincast.predict("bert-large", on="rtx-3090", gpus=8, batch_size=1)
    assert result.interval_terms["wiring"] == pytest.approx(0.5 * result.exposed_comm / result.iteration)

"""A question and its result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traincast.costs.host.profile import load_host_profile
from traincast.hardware.platform import load_platform
from traincast.models.catalog import load_model
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario

QUESTION = Scenario(workload="vgg13", on="v100", batch_size=4)


def test_names_and_values_give_the_same_answer():
    named = predict(QUESTION.replace(host="server-2022"))
    given = predict(
        QUESTION.replace(workload=load_model("vgg13"), on=load_platform("v100"), host=load_host_profile("server-2022"))
    )

    assert given.iteration == named.iteration
    assert given.host_profile == named.host_profile == "server-2022"


def test_a_locked_clock_is_slower():
    slow = predict(QUESTION.replace(clock_mhz=800.0))

    assert slow.platform.device.clock_mhz == 800
    assert slow.iteration > predict(QUESTION).iteration


def test_rooflines_are_what_all_durations_come_from():
    assert set(predict(QUESTION.replace(roofline_only=True)).by_source) == {"roofline"}


def test_tf32_reaches_the_kernels():
    exact = predict(Scenario(workload="bert-large", on="a100-80gb", batch_size=2))
    fast = predict(Scenario(workload="bert-large", on="a100-80gb", batch_size=2, dtype="tf32"))

    assert fast.by_family["gemm"] < 0.6 * exact.by_family["gemm"]


def test_links_are_assumed_and_said_only_of_several_gpus():
    question = Scenario(workload="bert-large", on="a100-40gb", batch_size=2)
    alone = predict(question.replace(gpus=1))
    several = predict(question.replace(gpus=2))

    assert alone.warnings == ()
    (assumed,) = several.warnings
    assert "a100-40gb is one GPU; several are taken to be joined as in" in assumed


@pytest.mark.parametrize(("gpus", "many"), [(1, False), (2, True)])
def test_the_platform_has_links_where_there_are_several_gpus(gpus, many):
    assert (predict(QUESTION.replace(on="a100-40gb", gpus=gpus)).platform.topology is not None) == many


def test_a_compiled_step_says_so():
    question = Scenario(workload="bert-large", on="v100", batch_size=1, mode="inference", compiled=True)

    (said,) = predict(question).warnings
    assert said.startswith("compiled: chains of element-wise ops")


@pytest.mark.parametrize("device", ["v100", "t4", "p4", "mi250"])
def test_tf32_on_a_device_without_it_is_fp32_and_says_so(device):
    question = Scenario(workload="vgg13", on=device, batch_size=4)
    asked = predict(question.replace(batch_size=4, dtype="tf32"))

    assert asked.iteration == predict(question).iteration
    assert asked.warnings == (f"{device} has no TF32 units; it computes in fp32",)


@pytest.mark.parametrize("device", ["a10", "l4", "a100-80gb", "h100", "mi300x"])
@pytest.mark.parametrize("model", ["vgg13", "resnet50"])
def test_tf32_is_never_slower_than_fp32(model, device):
    """Libraries may choose their fp32 kernels: convolutions on A10 and L4 came out 8 to 13 % slower."""
    exact, fast = (
        predict(Scenario(workload=model, on=device, batch_size=32, dtype=dtype)) for dtype in ("fp32", "tf32")
    )

    assert fast.by_family["conv"] <= (1 + 1e-12) * exact.by_family["conv"]
    assert fast.warnings == ()


@pytest.mark.parametrize(("device", "dtype"), [("v100", "bf16"), ("t4", "bf16"), ("p100", "bf16"), ("p4", "fp16")])
def test_a_half_type_without_units_is_said(device, dtype):
    asked = predict(Scenario(workload="vgg13", on=device, batch_size=2, dtype=dtype))

    begin = f"{device} has no {dtype} units; GEMMs are taken to run at its fp32 rate"
    assert any(said.startswith(begin) for said in asked.warnings)


def test_fp32_convolutions_run_in_tf32_unless_the_script_forbids_it():
    workload = load_model("vgg13").resized(batch_size=4)
    default = predict(Scenario(workload=workload, on="a100-80gb"))
    exact = predict(Scenario(workload=replace(workload, tf32=()), on="a100-80gb"))

    assert default.by_family["conv"] < 0.8 * exact.by_family["conv"]
    assert default.by_family["gemm"] == pytest.approx(exact.by_family["gemm"])
    assert [said for said in default.warnings if "TF32" in said] and not exact.warnings


def test_products_that_a_script_lets_run_in_tf32_are_those_of_tf32():
    workload = load_model("bert-large").resized(batch_size=2)
    asked = predict(Scenario(workload=workload, on="a100-80gb", dtype="tf32"))
    by_script = predict(Scenario(workload=replace(workload, tf32=("products",)), on="a100-80gb"))

    assert by_script.iteration == asked.iteration

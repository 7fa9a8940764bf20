"""Ops outside of what was fitted: how far, why, and what they are worth of the step."""

from __future__ import annotations

import numpy as np
import pytest

import traincast
from traincast.costs.kernels.contract import Calls, Estimate
from traincast.costs.kernels.families import load_shipped_model
from traincast.costs.kernels.gemm import GEMM
from traincast.hardware.platform import load_device
from traincast.simulator.prediction.breakdown import OutsideOp


def product(m, n, k):
    return GEMM.call("mm", "bf16", batch=1, m=m, n=n, k=k, trans_a=0, trans_b=0, bias=0)


def estimates(calls, device):
    model = load_shipped_model("gemm")
    assert model is not None
    return model.predict(Calls.of(GEMM, calls), load_device(device))


def test_the_factor_is_that_of_the_size_farthest_outside():
    inside, once, twice = estimates(
        [product(4096, 4096, 4096), product(2**30, 4096, 4096), product(2**31, 4096, 4096)], "h100"
    ).factor

    assert inside == 1.0
    assert twice == pytest.approx(2 * once)


def test_a_gpu_that_was_not_measured_is_told_apart_from_sizes():
    known, unknown = (estimates([product(4096, 4096, 4096)], device) for device in ("h100", "h100-pcie"))

    assert (known.new_gpu.tolist(), unknown.new_gpu.tolist()) == ([False], [True])
    assert unknown.factor.tolist() == [1.0]


def test_a_model_that_tells_no_distance_counts_as_inside_its_sizes():
    whole = Estimate.zeros(3)
    whole.put(np.array([1]), Estimate(np.array([2.0]), np.array([0.1]), np.array([True])))

    assert whole.factor is not None and whole.new_gpu is not None
    assert (whole.seconds.tolist(), whole.factor.tolist(), whole.new_gpu.tolist()) == (
        [0, 2, 0],
        [1, 1, 1],
        [False] * 3,
    )


@pytest.mark.parametrize(
    ("factor", "new_gpu", "said"),
    [
        (1.0, False, "kind or type not measured"),
        (1.34, False, "sizes up to 1.3 x beyond"),
        (4021.0, False, "sizes up to 4,000 x beyond"),
        (12.0, True, "GPU not measured, sizes up to 12 x beyond"),
    ],
)
def test_why_in_a_few_words(factor, new_gpu, said):
    assert OutsideOp("aten::mm", 1.0, 0.1, factor, new_gpu).why == said


def test_json_keeps_the_names_and_gains_distances_that_add_up():
    result = traincast.predict("bert-large", on="h200")
    document = result.to_dict()

    assert document["out_of_domain_ops"] == [row["op"] for row in document["out_of_domain"]]
    assert sum(row["ms"] for row in document["out_of_domain"]) == pytest.approx(document["out_of_domain_ms"])
    assert all(row["factor"] >= 1.0 and 0.0 <= row["shift"] < 1.0 for row in document["out_of_domain"])
    assert document["out_of_domain"] == sorted(document["out_of_domain"], key=lambda row: -row["ms"])

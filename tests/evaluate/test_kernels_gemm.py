"""The shipped GEMM model against measurements outside every training set: guards against getting worse."""

from __future__ import annotations

import pytest

from traincast.evaluate.kernels_gemm import coverage_gemm, evaluate_gemm
from traincast.evaluate.kernels_gemm_timeline import evaluate_gemm_timeline

pytest.importorskip("polars")


@pytest.fixture(scope="module")
def table(shared_data):
    return {(row.suite, row.group): row for row in evaluate_gemm(shared_data)}


def of_suite(table, suite):
    return {group: row for (name, group), row in table.items() if name == suite}


def test_held_out_fp32_shapes_on_every_training_gpu(table):
    rows = of_suite(table, "gemm_fp32 held-out shapes")
    assert len(rows) == 10
    for group, row in rows.items():
        noisy = group == "Tesla T4 linear fp32"  # over the 5 % GMAE aimed at, see docs/kernels/gemm.md
        assert row.gmae <= (5.5 if noisy else 5.0), group
        assert row.mape <= 9.0, group
        assert abs(row.bias) < 3, group


def test_held_out_mixed_precision_shapes_on_every_system(table):
    rows = of_suite(table, "gemm_mixed held-out shapes")
    assert len(rows) == 9
    for group, row in rows.items():
        assert row.gmae <= 8.0, group


@pytest.mark.parametrize(("kind", "published"), [("bmm", 13.8), ("linear", 13.9)])
def test_unseen_gpus_beat_the_published_error_on_average(table, kind, published):
    rows = of_suite(table, "gemm_fp32 test split")
    unseen = [rows[f"{name} {kind} fp32"] for name in ("NVIDIA A100 80GB PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA L4")]
    assert sum(row.n * row.mape for row in unseen) / sum(row.n for row in unseen) < published


@pytest.mark.parametrize(("name", "most"), [("NVIDIA H100 80GB HBM3", 15.0), ("NVIDIA L4", 17.0)])
def test_a_gpu_left_out_of_every_fit(table, name, most):  # 15 % is aimed at; L4's own noise takes 14.5 of its error
    rows = of_suite(table, "gemm_fp32 test split")
    both = [rows[f"{name} {kind} fp32"] for kind in ("bmm", "linear")]
    assert sum(row.n * row.mape for row in both) / sum(row.n for row in both) < most


def test_kernels_of_a_profile_outside_every_training_set(shared_data):
    row = evaluate_gemm_timeline(shared_data)[0]
    assert row.n == 24
    assert row.mape < 20
    assert abs(row.bias) < 12


def test_intervals_hold_what_they_promise_on_held_out_shapes_and_on_another_run(shared_data):
    coverage = coverage_gemm(shared_data)
    for group, (n, share) in coverage.items():
        if "held-out" in group and n > 500:
            assert 0.84 < share < 0.98, group
    other_library = "gemm_fp32 test split | Tesla P4 linear fp32"
    other_run = {
        group: (n, share)
        for group, (n, share) in coverage.items()
        if "test split" in group and " all " not in group and group != other_library
    }
    assert min(share for _, share in other_run.values()) > 0.65
    inside = sum(n * share for n, share in other_run.values()) / sum(n for n, _ in other_run.values())
    assert 0.85 < inside < 0.95

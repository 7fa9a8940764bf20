"""The shipped GEMM model against measurements outside every training set: guards against getting worse."""

from __future__ import annotations

import pytest

from traincast_evaluation.kernels.gemm.evaluate import evaluate_gemm, known_kernels
from traincast_evaluation.kernels.gemm.measurements import kernels_run, read_gemm
from traincast_evaluation.kernels.gemm.other_sources import evaluate_gemm_timeline
from traincast_evaluation.suites.dlrm_timeline import evaluate_dlrm_timeline

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
        assert row.gmae <= 5.0, group
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
def test_a_gpu_left_out_of_every_fit(table, name, most):  # 15 % is aimed at; L4's own scatter takes 14.3 of its error
    rows = of_suite(table, "gemm_fp32 test split")
    both = [rows[f"{name} {kind} fp32"] for kind in ("bmm", "linear")]
    assert sum(row.n * row.mape for row in both) / sum(row.n for row in both) < most


def test_kernels_of_a_profile_outside_every_training_set(shared_data):
    row = evaluate_gemm_timeline(shared_data)[0]
    assert row.n == 24
    assert row.mape < 20
    assert abs(row.bias) < 12


@pytest.mark.parametrize(("kind", "published"), [("bmm", 26.0), ("linear", 20.0)])
def test_training_gpus_beat_the_published_error_where_the_library_ran_the_same_kernels(table, kind, published):
    row = of_suite(table, "gemm_fp32 test split")[f"training GPUs, kernels seen in training {kind} fp32"]
    assert row.n > 4000
    assert row.mape < published


def test_only_the_p4_ran_other_kernels_in_its_test_rows_than_in_its_training_rows(shared_data):
    rows = read_gemm(shared_data, "gemm_fp32")
    known = known_kernels(rows, kernels_run(shared_data))
    linear = rows.test & rows.calls.is_kind("linear")
    names = rows.device_names()
    assert not known[linear & (names == "Tesla P4")].any()
    for name in ("Tesla P100-PCIE-16GB", "Tesla T4", "Tesla V100-PCIE-32GB"):
        assert known[linear & (names == name)].mean() > 0.95, name


def test_intervals_hold_what_they_promise_on_held_out_shapes(table):
    rows = [row for (suite, _), row in table.items() if "held-out" in suite and "never seen" not in suite]
    for row in rows:
        # block-scaled fp8 is met within 2 %: less than what is added for another run of the same card
        most = 100 if "fp8_block" in row.group else 98
        assert row.n < 500 or 84 < row.covered < most, row
    for table_name in ("gemm_fp32", "gemm_amd", "gemm_mixed", "deepbench"):
        of_table = [row for row in rows if row.suite.startswith(table_name)]
        assert 85 < sum(row.n * row.covered for row in of_table) / sum(row.n for row in of_table) < 95.5, table_name


def test_intervals_hold_on_another_run(table):
    other_run = [
        row
        for group, row in of_suite(table, "gemm_fp32 test split").items()
        if not group.startswith(("all", "training")) and group != "Tesla P4 linear fp32"  # another library
    ]
    assert min(row.covered for row in other_run) > 65
    assert 85 < sum(row.n * row.covered for row in other_run) / sum(row.n for row in other_run) < 95


def test_the_kernels_of_a_dlrm_step_add_up_within_five_percent(shared_data):
    sums = [row for row in evaluate_dlrm_timeline(shared_data) if row.group.endswith("sum of kernels")]
    assert [abs(row.bias) < 5 for row in sums] == [True, True]


def test_held_out_shapes_of_later_devices(table):
    rows = of_suite(table, "gemm_mixed_blackwell held-out shapes")
    assert len(rows) == 16  # four devices, four types
    for group, row in rows.items():
        assert row.gmae <= (9.0 if "RTX" in group else 5.0), group
        assert row.covered > 85, group


def test_later_devices_as_if_they_had_never_been_measured(table):
    rows = of_suite(table, "gemm_mixed_blackwell GPU never seen, held-out shapes")
    bf16 = {group: row for group, row in rows.items() if "bf16" in group}
    assert len(bf16) == 4
    for group, row in bf16.items():
        assert row.gmae <= (20.0 if "RTX" in group else 9.0), group

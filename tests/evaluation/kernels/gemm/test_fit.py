"""Reading GEMM measurements: what may be fitted, and what is rejected by name, row and column."""

from __future__ import annotations

import numpy as np
import pytest

from tests.costs.kernels.gemm.test_model import products, random_sizes
from traincast.costs.kernels.gemm.model import GemmModel
from traincast.costs.kernels.gemm.physics import ENGINES, Problem, describe_gemm
from traincast.hardware import load_device
from traincast.utils.errors import TraincastError
from traincast_evaluation.kernels.gemm.fit import fit_engines, fit_gemm, is_fittable
from traincast_evaluation.kernels.gemm.measurements import Stopwatch, as_timed, read_gemm
from traincast_evaluation.kernels.samples import Measurements

pl = pytest.importorskip("polars")

_ROW = {
    "device": "Tesla V100-PCIE-32GB", "op": "linear", "split": "train",
    "batch": 1, "m": 1024, "n": 1024, "k": 1024, "latency_us": 300.0,
}  # fmt: skip


@pytest.fixture
def table(tmp_path):
    def write(**changes):
        rows = [dict(_ROW, m=1024 + i) for i in range(10)]
        rows[3].update({name: value for name, value in changes.items() if value is not None})
        frame = pl.DataFrame(rows).drop([name for name, value in changes.items() if value is None])
        (tmp_path / "kernels").mkdir(exist_ok=True)
        frame.write_parquet(tmp_path / "kernels" / "gemm_fp32.parquet")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"k": None}, ["gemm_fp32.parquet", "'k'"]),
        ({"latency_us": -1.0}, ["gemm_fp32.parquet", "row 3", "latency_us"]),
        ({"latency_us": 1.0}, ["row 3", "latency_us", "3 times faster"]),
        ({"device": "GeForce 256"}, ["row 3", "device", "GeForce 256"]),
    ],
)
def test_bad_rows_are_refused_and_nothing_is_written(table, tmp_path, changes, names):
    data, out = table(**changes), tmp_path / "out"
    out.mkdir()
    with pytest.raises(TraincastError) as caught:
        fit_gemm(data, out, lambda message, share: None)
    for name in names:
        assert name in str(caught.value)
    assert not list(out.iterdir())


def test_the_held_out_fifth_and_the_test_split_are_never_fitted(shared_data):
    rows = read_gemm(shared_data, "gemm_fp32")
    use = is_fittable(rows)
    assert not (use & (rows.held_out | rows.test)).any()
    assert 0.18 < np.mean(rows.held_out[~rows.test]) < 0.22
    measured = {rows.devices[i].key for i in np.unique(rows.device[use])}
    assert not measured & {"h100", "l4", "a100-80gb-pcie"}


def test_frameworks_that_time_one_shape_become_their_median(shared_data):
    rows = read_gemm(shared_data, "gemm_mixed")
    shapes = np.concatenate([rows.device[:, None], rows.calls.compute[:, None], rows.calls.values[:, 1:4]], axis=1)
    assert len(np.unique(shapes, axis=0)) == len(rows)


def test_columns_first_tables_change_the_places_of_their_operands(shared_data):
    frame = pl.read_parquet(shared_data / "kernels" / "deepbench.parquet").filter(
        (pl.col("op") == "gemm") & (pl.col("precision") == "fp32")
    )
    rows = read_gemm(shared_data, "deepbench")
    fp32 = rows.calls.is_compute("fp32")
    assert sorted(rows.calls["n"][fp32]) == sorted(frame["m"].to_list())
    assert rows.calls["trans_b"][fp32].sum() == frame["trans_a"].sum()


def test_a_stopwatch_shows_the_floor_for_short_kernels_and_the_sum_for_long_ones():
    floor, offset = np.array([5e-5]), np.array([2e-5])
    assert as_timed(np.array([1e-6]), floor, offset)[0] == pytest.approx(5e-5, rel=0.01)
    assert as_timed(np.array([1e-2]), floor, offset)[0] == pytest.approx(1.002e-2, rel=1e-3)


def synthetic(n=300):
    v100 = load_device("v100-pcie")
    calls = products(random_sizes(n, seed=5, most=4096))
    physical, _ = describe_gemm(ENGINES["simt"], Problem.of(calls, v100, "fp32", 4.0))
    return Measurements(calls, [v100], np.zeros(n, dtype=np.int64), 1.5 * physical)


def test_fit_recovers_a_constant_factor_and_is_deterministic():
    data = synthetic()
    first, second = (GemmModel(fit_engines(data, Stopwatch.none(len(data.seconds)))[0]) for _ in range(2))
    for name, array in first.state().items():
        assert array.tobytes() == second.state()[name].tobytes(), name
    fresh = products(random_sizes(200, seed=9, most=4096))
    physical, _ = describe_gemm(ENGINES["simt"], Problem.of(fresh, data.devices[0], "fp32", 4.0))
    ratio = first.predict(fresh, data.devices[0]).seconds / (1.5 * physical)
    assert np.median(np.abs(ratio - 1)) < 0.05

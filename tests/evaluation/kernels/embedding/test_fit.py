"""Fitting embedding kernels: the same bytes twice, rows set apart by shape, bad rows named."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

from tests.costs.kernels.embedding.test_model import lookups
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.physics import Rates, estimate_embedding_seconds
from traincast.costs.kernels.families import PROFILES
from traincast.hardware import load_device
from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting.profile_fits import PIECES
from traincast_evaluation.kernels.embedding.fit import FITTED, TRAINING, fit_embedding, fit_spreads, judge_spreads
from traincast_evaluation.kernels.embedding.measurements import (
    STUDY_FILE,
    TRACES_FILE,
    empty_block_cycles,
    read_embedding,
)
from traincast_evaluation.kernels.samples import Measurements

pytest.importorskip("polars")

JOB = {
    "trace": "hta_recsys_a100_rank3of8", "device": "NVIDIA A100-PG509-200", "rank": 3, "world_size": 8,
    "optimizer": "rowwise_adagrad", "weighted": "false", "batch": 8192, "num_tables": 122, "total_dim": 8720,
    "weight_elements": 7487072, "total_rows": 90837,
}  # fmt: skip

ONE_TABLE = {"weighted": "true", "num_tables": 1, "total_dim": 96, "weight_elements": 96_000, "total_rows": 1000}


def study():
    base = {"device": "V100", "batch": 4096, "num_tables": 32, "rows_per_table": 500000, "embedding_dim": 128}
    return [
        base | {"direction": "backward_sgd", "lookups_per_table": bag, "latency_us": 310.0 * bag,
                "context": "microbenchmark"}
        for bag in (16, 32, 38, 64)
    ]  # fmt: skip


def jobs():
    kernels = {"forward_unweighted_kernel": 2500.0, "kernel_cta_per_row_1": 5700.0, "kernel_warp_per_row_1": 1200.0}
    return [
        JOB | {"step": step, "num_indices": indices, "kernel_name": f"split_embedding_{name}",
               "direction": "forward" if name.startswith("forward") else "backward",
               "duration_us": scale * took} | tables
        for step in (1009, 1010, 1011)
        for indices, scale, tables in ((15_807_216, 1.0, {}), (158_072, 0.0125, ONE_TABLE))
        for name, took in kernels.items()
    ]  # fmt: skip


def write(folder, study_rows, job_rows):
    (folder / "kernels").mkdir(exist_ok=True)
    for file, rows in ((STUDY_FILE, study_rows), (TRACES_FILE, job_rows)):
        with (folder / file).open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder


def quiet(step: str, share: float) -> None:
    """Progress that nobody watches."""


def test_a_fit_writes_the_same_bytes_twice(tmp_path):
    data = write(tmp_path, study(), jobs())
    for out in ("first", "second"):
        (tmp_path / out).mkdir()
        provenance = TRAINING(data, tmp_path / out, quiet)
    for suffix in ("npz", "json"):
        first, second = ((tmp_path / out / f"embedding.{suffix}").read_bytes() for out in ("first", "second"))
        assert first == second
    assert (provenance["rows_fitted"], provenance["rows_held_out"]) == (10, 6)
    assert (provenance["whole_lookups_fitted"], provenance["mean_error_percent_whole_held_out"]) == (0, None)
    assert provenance["sources"] and all("(" in source for source in provenance["sources"]), "with their licences"


def test_the_shipped_profile_is_what_the_measurements_give(shared_data, tmp_path):
    PIECES["embedding"].fit(shared_data, tmp_path, quiet)
    with np.load(tmp_path / "embedding.npz") as made, np.load(PROFILES / "embedding.npz") as shipped:
        assert sorted(made.files) == sorted(shipped.files)
        for name in made.files:
            if made[name].dtype.kind == "f":
                np.testing.assert_allclose(made[name], shipped[name], rtol=1e-4)  # as near as processors round alike


def test_rows_are_set_apart_by_shape(shared_data):
    rows = read_embedding(shared_data)
    study = np.array([group.startswith("table-batched") for group in rows.group])
    fitted, held = (set(rows.shape[study & chosen].tolist()) for chosen in (~rows.held_out, rows.held_out))
    assert fitted and held and not fitted & held
    later = [name for name in rows.name[~rows.held_out] if "step 101" in name and "step 1010" not in name]
    assert later == []


def test_an_interval_is_judged_without_the_rows_of_its_own_shape(tmp_path):
    """Given one shape far off its prediction; then it widens the interval of the others and not its own."""
    rows = read_embedding(write(tmp_path, study(), jobs()))
    seconds = rows.seconds.copy()
    wild = rows.shape == next(shape for shape in rows.shape[rows.held_out] if "64 lookups" in shape)
    seconds[wild] *= 2.0
    sigma = judge_spreads(rows, seconds)
    long = rows.held_out & (seconds > 50e-6)
    assert (sigma[long & ~wild] > 0.3).all() and (sigma[wild] < 0.01).all()
    assert np.isnan(sigma[~rows.held_out]).all()
    assert fit_spreads(rows, seconds, rows.held_out)[0] > 0.3


def test_empty_blocks_are_read_off_the_slope_of_the_warp_kernel(tmp_path):
    data = write(tmp_path, study(), jobs())
    device_cycles = 1e-6 * (1200.0 - 15.0) / ((15_807_216 - 158_072) / 16) * 108 * 1.41e9
    assert empty_block_cycles(data) == pytest.approx(device_cycles, rel=0.01)


@pytest.mark.parametrize(
    ("file", "row", "change", "words"),
    [
        (0, 1, {"latency_us": -1.0}, ["embedding_v100.csv", "row 1", "'latency_us'", "-1.0"]),
        (0, 2, {"latency_us": "fast"}, ["row 2", "'latency_us'", "'fast' is not a number"]),
        (0, 3, {"latency_us": 1.0}, ["row 3", "'latency_us'", "faster"]),
        (0, 0, {"device": "Voodoo 2"}, ["row 0", "'device'", "Voodoo 2"]),
        (0, 1, {"direction": "sideways"}, ["row 1", "'direction'", "sideways"]),
        (0, 1, {"rows_per_table": ""}, ["row 1", "'rows_per_table'"]),
        (0, 1, {"embedding_dim": 0}, ["row 1", "'embedding_dim'"]),
        (1, 4, {"duration_us": "nan"}, ["embedding_from_traces.csv", "row 4", "'duration_us'"]),
        (1, 0, {"duration_us": 0.5}, ["row 0", "'duration_us'", "faster"]),
        (1, 5, {"device": "Voodoo 2"}, ["row 5", "'device'", "Voodoo 2"]),
        (1, 2, {"optimizer": "lion"}, ["row 2", "'optimizer'", "lion"]),
        (1, 3, {"num_indices": 0}, ["row 3", "'num_indices'"]),
    ],
)
def test_bad_rows_are_named_by_file_row_and_column_and_nothing_is_written(tmp_path, file, row, change, words):
    tables = [study(), jobs()]
    tables[file][row] |= change
    data, out = write(tmp_path, *tables), tmp_path / "out"
    out.mkdir()
    with pytest.raises(TraincastError) as caught:
        TRAINING(data, out, quiet)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert list(out.iterdir()) == []


def test_a_missing_column_is_named(tmp_path):
    rows = [{name: value for name, value in row.items() if name != "num_tables"} for row in study()]
    with pytest.raises(TraincastError, match=r"embedding_v100.csv' lacks the column 'num_tables'"):
        read_embedding(write(tmp_path, rows, jobs()))


TRUE = Rates(
    start_seconds=4e-6, update_start_seconds=25e-6, read_share=0.8, scattered_write_share=0.4, sorted_write_share=0.5,
    l2_bytes_per_clock=30.0, long_row_seconds=2e-6, long_row_l2_share=0.7,
)  # fmt: skip


MADE = (
    [lookups("batched_forward", bag=bag, rows=rows) for bag in (1, 8, 64) for rows in (100, 10**6)]
    + [lookups("batched_backward_sgd", bag=bag, ascending=a) for bag in (8, 64) for a in (False, True)]
    + [lookups("tbe_backward_sgd", tables=t, rows=rows, bag=bag) for t in (1, 16) for rows in (50, 2000)
       for bag in (1, 64)]
    + [lookups("tbe_backward_sgd", batch=16, tables=1, bag=1, dim=16)]
)  # fmt: skip


def made(calls):
    calls, device = Calls.of(EMBEDDING, calls), load_device("v100")
    seconds = estimate_embedding_seconds(calls, device, TRUE)
    return Measurements(calls, [device], np.zeros(len(calls), dtype=np.int64), seconds)


def test_a_fit_finds_the_rates_that_made_the_times():
    found = fit_embedding(made(MADE)).parameters_.rates
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.03), name


def test_a_rate_that_no_row_tells_stays_as_it_was():
    """Given table-batched rows only, when fitted, then what FBGEMM's updates do is as before."""
    start = replace(Rates(), long_row_seconds=7e-6)
    found = fit_embedding(made(MADE[:10]), start).parameters_.rates
    for name in ("update_start_seconds", "long_row_seconds", "long_row_l2_share", "empty_block_cycles"):
        assert getattr(found, name) == pytest.approx(getattr(start, name), rel=1e-12), name
    assert found.read_share == pytest.approx(TRUE.read_share, rel=0.03)


def test_one_wild_row_does_not_steer_the_fit():
    data = made(MADE)
    data.seconds[1] *= 4.0
    found = fit_embedding(data).parameters_.rates
    assert found.read_share == pytest.approx(TRUE.read_share, rel=0.1)
    assert found.scattered_write_share == pytest.approx(TRUE.scattered_write_share, rel=0.1)

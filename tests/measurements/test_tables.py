"""Reading kernel measurements: what is refused, what is set apart, and that a fit repeats to the byte."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.errors import TraincastError
from traincast.kernels.attention.training import read_attention
from traincast.kernels.conv.boosting import Boosting, boost
from traincast.kernels.solve import nonnegative, relative_fit, spread_90
from traincast.kernels.streaming.training import fit_elementwise
from traincast.measurements.tables import check_positive, check_possible, devices_in, held_out, read_table

polars = pytest.importorskip("polars")


def quiet(step: str, share: float) -> None:
    """Progress that nobody watches."""


def vectors(folder, **changes):
    """A tiny table of element-wise measurements at 800 GB/s behind a floor of 30 us, with one thing changed."""
    sizes = [(rows, cols) for rows in (8, 64, 512, 4096, 8192, 16384) for cols in range(64, 4097, 448)]
    table = {
        "device": ["Tesla V100-PCIE-32GB"] * len(sizes), "op": ["add", "relu"] * (len(sizes) // 2),
        "split": ["train"] * len(sizes), "rows": [rows for rows, _ in sizes], "cols": [cols for _, cols in sizes],
    }  # fmt: skip
    moved = [(12 if op == "add" else 8) * r * c for op, (r, c) in zip(table["op"], sizes, strict=True)]
    table["latency_us"] = [max(30.0, 17.0 + size / 800e3) for size in moved]
    table.update(changes)
    table = {name: column for name, column in table.items() if column is not None}
    (folder / "kernels").mkdir(exist_ok=True)
    for name in ("vector_fp32", "vector_amd"):
        polars.DataFrame(table).write_parquet(folder / "kernels" / f"{name}.parquet")
    return folder, len(sizes)


def test_a_fit_finds_the_bandwidth_behind_the_floor_and_writes_the_same_bytes_twice(tmp_path):
    data, _ = vectors(tmp_path)
    for out in ("first", "second"):
        (tmp_path / out).mkdir()
        provenance = fit_elementwise(data, tmp_path / out, quiet)
    for suffix in ("npz", "json"):
        first, second = ((tmp_path / out / f"elementwise.{suffix}").read_bytes() for out in ("first", "second"))
        assert first == second
    assert provenance["mean_error_percent_held_out"] < 3.0
    with np.load(tmp_path / "first" / "elementwise.npz") as state:
        assert float(state["devices"][0, :2].mean()) == pytest.approx(800 / 900, rel=0.05)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n: {"cols": None}, ["vector_fp32", "'cols'"]),
        (lambda n: {"latency_us": [20.0] * (n - 1) + [-1.0]}, ["row 59", "latency_us", "-1.0"]),
        (lambda n: {"latency_us": [20.0] * (n - 1) + [float("nan")]}, ["row 59", "latency_us"]),
        (lambda n: {"latency_us": [0.5] * n}, ["latency_us", "faster", "V100"]),
        (lambda n: {"device": ["Voodoo 2"] * n}, ["vector_fp32", "row 0", "device", "Voodoo 2"]),
        (lambda n: {"rows": ["8"] * (n - 1) + ["many"]}, ["vector_fp32", "row 59", "rows", "'many' is not a number"]),
        (lambda n: {"op": ["add"] * (n - 1) + ["sqrt"]}, ["row 59", "'op'", "sqrt", "relu"]),
        (lambda n: {"split": [None] * n}, ["row 0", "'split'", "train"]),
        (lambda n: {name: [] for name in ("device", "op", "split", "rows", "cols", "latency_us")}, ["has no rows"]),
    ],
)
def test_bad_data_is_named_by_file_row_and_column_and_nothing_is_written(tmp_path, change, words):
    _, size = vectors(tmp_path)
    data, _ = vectors(tmp_path, **change(size))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(TraincastError) as caught:
        fit_elementwise(data, out, quiet)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert list(out.iterdir()) == []


def test_rows_keep_their_place_in_the_file_when_some_are_set_aside(tmp_path):
    table = {"device": ["Tesla T4", "Tesla V100-PCIE-32GB", "Voodoo 2"], "m": [1.0, 2.0, 0.0]}
    polars.DataFrame(table).write_parquet(tmp_path / "some.parquet")
    rows = read_table(tmp_path, "some.parquet", ("device",), ("m",))
    last = rows.take(np.array([False, True, True])).take(np.array([False, True]))
    with pytest.raises(TraincastError, match=r"'some.parquet', row 2, column 'device': .*Voodoo 2"):
        devices_in(last)
    with pytest.raises(TraincastError, match=r"'some.parquet', row 2, column 'm': 0.0 is not a positive number"):
        check_positive(last, "m")
    with pytest.raises(TraincastError, match=r"'some.parquet', row 2, column 'm': .* 3 times faster"):
        check_possible(last, np.array([1.0]), np.array([0.1]), "m")


def attention(folder, **changes):
    """A tiny table of two frameworks, of which only the second is fitted, with one thing changed."""
    table = {
        "device": ["NVIDIA L40S"] * 8, "framework": ["sglang"] * 4 + ["vllm"] * 4, "dtype": ["bfloat16"] * 8,
        "batch": [1, 2, 4, 8] * 2, "seq_len": [128] * 8, "num_q_heads": [8] * 8, "num_kv_heads": [8] * 8,
        "head_dim": [64] * 8, "latency_us": [20.0] * 8,
    }  # fmt: skip
    table.update(changes)
    (folder / "kernels").mkdir()
    polars.DataFrame(table).write_parquet(folder / "kernels" / "attention_mixed.parquet")
    return folder


def test_attention_is_checked_in_the_rows_of_every_framework(tmp_path):
    assert len(read_attention(attention(tmp_path)).seconds) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": ["NVIDIA L40S"] * 2 + ["Voodoo 2"] + ["NVIDIA L40S"] * 5}, ["row 2", "'device'", "Voodoo 2"]),
        ({"latency_us": [20.0] * 3 + [1e-3] + [20.0] * 4}, ["row 3", "'latency_us'", "faster"]),
        ({"dtype": ["bfloat16"] * 7 + ["fp8"]}, ["row 7", "'dtype'", "fp8"]),
        ({"framework": ["sglang"] * 8}, ["framework", "vllm"]),
    ],
)
def test_bad_attention_rows_are_named(tmp_path, change, words):
    with pytest.raises(TraincastError) as caught:
        read_attention(attention(tmp_path, **change))
    for word in ["attention_mixed", *words]:
        assert word in str(caught.value)


def test_a_device_with_small_shapes_only_is_named_and_not_fitted(tmp_path):
    sizes = [(rows, cols) for rows in (8, 64) for cols in range(64, 2049, 448)]
    data, _ = vectors(
        tmp_path, device=["Tesla V100-PCIE-32GB"] * len(sizes), op=["add"] * len(sizes), split=["train"] * len(sizes),
        rows=[rows for rows, _ in sizes], cols=[cols for _, cols in sizes],
        latency_us=[30.0 + 2.0 * i for i in range(len(sizes))],
    )  # fmt: skip
    with pytest.raises(TraincastError, match=r"V100-PCIE-32GB.*L2"):
        fit_elementwise(data, tmp_path, quiet)


def test_a_missing_or_damaged_file_is_one_clear_line(tmp_path):
    with pytest.raises(TraincastError, match="--data"):
        read_table(tmp_path, "kernels/vector_fp32.parquet", (), ())
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(TraincastError, match=r"broken\.parquet") as caught:
        read_table(tmp_path, "broken.parquet", (), ())
    assert "\n" not in str(caught.value)


def test_about_a_fifth_is_held_out_and_equal_shapes_fall_together():
    rows, cols = np.meshgrid(np.arange(1.0, 200.0), np.arange(1.0, 200.0))
    chosen = held_out(rows.ravel(), cols.ravel())
    assert chosen.mean() == pytest.approx(0.2, abs=0.01)
    assert np.array_equal(chosen, held_out(rows.ravel(), cols.ravel()))
    assert not np.array_equal(chosen, held_out(cols.ravel(), rows.ravel()))


def test_non_negative_least_squares_agrees_with_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    random = np.random.default_rng(3)
    for _ in range(20):
        matrix, target = random.normal(size=(40, 7)), random.normal(size=40)
        np.testing.assert_allclose(nonnegative(matrix, target), optimize.nnls(matrix, target)[0], atol=1e-8)


def test_a_relative_fit_shrugs_off_a_few_wild_rows():
    random = np.random.default_rng(4)
    features = random.uniform(0.1, 10, size=(300, 2))
    seconds = features @ np.array([2.0, 0.5])
    seconds[::30] *= 5
    np.testing.assert_allclose(relative_fit(features, seconds), [2.0, 0.5], rtol=0.05)


def test_a_conformal_spread_covers_nine_in_ten():
    random = np.random.default_rng(5)
    measured = np.exp(random.normal(0, 0.2, 2000))
    sigma = spread_90(np.ones(1000), measured[:1000])
    assert sigma == pytest.approx(0.2, rel=0.1)
    assert np.mean(np.abs(np.log(measured[1000:])) <= 1.645 * sigma) == pytest.approx(0.9, abs=0.03)


def test_boosted_trees_learn_a_step_extrapolate_flat_and_survive_their_state():
    random = np.random.default_rng(6)
    features = random.uniform(0, 1, (4000, 3))
    target = np.where(features[:, 1] > 0.5, 0.3, -0.2)
    trees = boost(features, target, np.ones(4000), trees=400, depth=3)
    far = np.array([[0.5, 0.9, 0.5], [0.5, 99.0, 0.5], [0.5, 0.1, 0.5], [0.5, -99.0, 0.5]])
    predicted = trees.predict(far)
    np.testing.assert_allclose(predicted, [0.3, 0.3, -0.2, -0.2], atol=0.03)
    assert predicted[0] == predicted[1]
    assert np.array_equal(Boosting.from_state(trees.state("x"), "x").predict(far), predicted)

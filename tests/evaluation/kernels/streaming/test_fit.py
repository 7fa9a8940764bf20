"""Fitting the memory system: bandwidth found behind the floor, bad data named, the same bytes twice."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.utils.errors import TraincastError
from traincast_evaluation.kernels.streaming.fit import TRAINING

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
        provenance = TRAINING(data, tmp_path / out, quiet)
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
        (lambda n: {"split": [None] * n}, ["row 0", "'split'", "is empty"]),
        (lambda n: {name: [] for name in ("device", "op", "split", "rows", "cols", "latency_us")}, ["has no rows"]),
    ],
)
def test_bad_data_is_named_by_file_row_and_column_and_nothing_is_written(tmp_path, change, words):
    _, size = vectors(tmp_path)
    data, _ = vectors(tmp_path, **change(size))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(TraincastError) as caught:
        TRAINING(data, out, quiet)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert list(out.iterdir()) == []


def test_a_device_with_small_shapes_only_is_named_and_not_fitted(tmp_path):
    sizes = [(rows, cols) for rows in (8, 64) for cols in range(64, 2049, 448)]
    data, _ = vectors(
        tmp_path, device=["Tesla V100-PCIE-32GB"] * len(sizes), op=["add"] * len(sizes), split=["train"] * len(sizes),
        rows=[rows for rows, _ in sizes], cols=[cols for _, cols in sizes],
        latency_us=[30.0 + 2.0 * i for i in range(len(sizes))],
    )  # fmt: skip
    with pytest.raises(TraincastError, match=r"V100-PCIE-32GB.*L2"):
        TRAINING(data, tmp_path, quiet)

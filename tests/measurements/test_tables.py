"""Reading kernel measurements: what is refused, what is set apart, and that a fit repeats to the byte."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.errors import TraincastError
from traincast.measurements.tables import check_positive, check_possible, devices_in, held_out, read_table

polars = pytest.importorskip("polars")


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


def test_a_missing_or_damaged_file_is_one_clear_line(tmp_path):
    with pytest.raises(TraincastError, match="`data`"):
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

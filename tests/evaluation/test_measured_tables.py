"""Reading kernel measurements: what is rejected, what is set apart, and that a fit repeats to the byte."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.utils.errors import TraincastError
from traincast_evaluation.measured_tables import (
    check_positive,
    check_possible,
    list_devices,
    read_medians,
    read_table,
    select_held_out,
)

polars = pytest.importorskip("polars")


def test_rows_keep_their_place_in_the_file_when_some_are_set_aside(tmp_path):
    table = {"device": ["Tesla T4", "Tesla V100-PCIE-32GB", "Voodoo 2"], "m": [1.0, 2.0, 0.0]}
    polars.DataFrame(table).write_parquet(tmp_path / "some.parquet")
    rows = read_table(tmp_path, "some.parquet", ("device",), ("m",))
    last = rows.take(np.array([False, True, True])).take(np.array([False, True]))
    with pytest.raises(TraincastError, match=r"'some.parquet', row 2, column 'device': .*Voodoo 2"):
        list_devices(last)
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
    chosen = select_held_out(rows.ravel(), cols.ravel())
    assert chosen.mean() == pytest.approx(0.2, abs=0.01)
    assert np.array_equal(chosen, select_held_out(rows.ravel(), cols.ravel()))
    assert not np.array_equal(chosen, select_held_out(cols.ravel(), rows.ravel()))


def test_all_odd_rows_are_listed_with_their_reasons(tmp_path):
    table = {
        "device": ["a", "b", "a", None, "c", None],
        "m": ["1", "x", "2", "y\n", "3", ""],
        "n": [1.0, 0, -2, 4, 5, 6],
    }
    polars.DataFrame(table).write_parquet(tmp_path / "some.parquet")

    def refusal(*columns, **options):
        with pytest.raises(TraincastError) as caught:
            read_table(tmp_path, "some.parquet", *columns, **options)
        return str(caught.value)

    assert refusal(("device",), ()) == "'some.parquet', row 3, column 'device': is empty; row 5: is empty"
    assert refusal((), ("m",)) == (
        "'some.parquet', row 1, column 'm': 'x' is not a number of at most 1e+15; "
        "row 3: 'y\\n' is not a number of at most 1e+15; row 5: '' is not a number of at most 1e+15"
    )
    assert refusal((), ("n",), positive=("n",)) == (
        "'some.parquet', row 1, column 'n': 0.0 is not a positive number; row 2: -2.0 is not a positive number"
    )
    said = refusal(("device",), (), among={"device": ("a",)}, optional=("device",))
    assert "row 1, column 'device': unknown device 'b'" in said
    assert "; row 4: unknown device 'c'" in said


def test_of_many_odd_rows_the_first_five_are_listed_and_the_others_counted(tmp_path):
    polars.DataFrame({"m": [0.0] * 40}).write_parquet(tmp_path / "some.parquet")
    with pytest.raises(TraincastError, match=r"row 0, column 'm'.*; row 4: 0.0 is not a positive number; and 35 more$"):
        read_table(tmp_path, "some.parquet", (), ("m",), positive=("m",))


def test_infinite_numbers_and_columns_of_another_kind_are_refused(tmp_path):
    frame = {
        "m": [1.0, float("inf"), 1e18],
        "lists": [[1], [2], [3]],
        "flag": [True, False, True],
        "version": [1, 2, 3],
    }
    polars.DataFrame(frame).write_parquet(tmp_path / "some.parquet")
    with pytest.raises(TraincastError, match=r"row 1, column 'm': inf is not a number of at most 1e.15; row 2: 1e.18"):
        read_table(tmp_path, "some.parquet", (), ("m",))
    with pytest.raises(TraincastError, match="column 'lists'"):
        read_table(tmp_path, "some.parquet", (), ("lists",))
    rows = read_table(tmp_path, "some.parquet", ("flag", "version"), ())
    assert rows.text("flag").tolist() == [True, False, True]
    assert rows.text("version").tolist() == ["1", "2", "3"]


def frameworks(folder, **changed):
    columns = {"device": ["a", "b", "a", "a"], "m": [2, 1, 1, 2], "us": [4.0, 5.0, 1.0, 8.0]} | changed
    polars.DataFrame(columns).write_parquet(folder / "many.parquet")
    return read_medians(folder, "many.parquet", ("device",), ("m",), "us", among={"device": ("a", "b")})


def test_rows_that_agree_become_their_median_in_order(tmp_path):
    table = frameworks(tmp_path)
    assert list(table.text("device")) == ["a", "a", "b"]
    assert list(table.number("m")) == [1.0, 2.0, 1.0]
    assert list(table.number("us")) == [1.0, 4.0, 5.0]  # the lower of two


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"us": [4.0, 5.0, 0.0, 8.0]}, ["row 2", "'us'"]),
        ({"us": [4.0, None, 1.0, 8.0]}, ["row 1", "'us'"]),
        ({"device": ["a", "c", "a", "a"]}, ["row 1", "'device'", "c"]),
        ({"m": [2, 1, 0, 2]}, ["'m'"]),
    ],
)
def test_a_median_hides_no_bad_row(tmp_path, changed, words):
    with pytest.raises(TraincastError) as caught:
        frameworks(tmp_path, **changed)
    for word in ["many.parquet", *words]:
        assert word in str(caught.value)


def test_rows_of_a_broken_framework_are_left_out(tmp_path):
    table = {"device": ["a", "a", "a"], "by": ["x", "y", "y"], "m": [1, 1, 2], "us": [3.0, 900.0, 5.0]}
    polars.DataFrame(table).write_parquet(tmp_path / "many.parquet")

    def read(**without):
        return read_medians(
            tmp_path, "many.parquet", ("device",), ("m",), "us", among={"device": ("a",)}, without=without
        )

    rows = read(by="y", device="a")
    assert (list(rows.number("m")), list(rows.number("us"))) == ([1.0], [3.0])
    assert list(read(by="y", device="b").number("us")) == [3.0, 5.0]  # both words, or nothing


def test_medians_of_a_column_that_is_not_there(tmp_path):
    polars.DataFrame({"m": [1]}).write_parquet(tmp_path / "few.parquet")
    with pytest.raises(TraincastError, match=r"'few.parquet' lacks the column 'us'; it has m"):
        read_medians(tmp_path, "few.parquet", (), ("m",), "us", among={})

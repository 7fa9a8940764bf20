"""Host profiles from the published overhead tables and from traces: the shipped ones again, and what is rejected."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting import host_versions
from traincast_evaluation.fitting.dates import date_profiles
from traincast_evaluation.fitting.host import (
    PROFILE,
    _add_defaults,
    _compute_t2,
    _compute_weighted_median,
    _read_older_tables,
    build_study_profile,
    fit_host,
)
from traincast_evaluation.fitting.host_traces import fit_host_from_traces

NEWER = "type,op,model,batch,mean_us,count\n"
GOOD = "T2,aten::add,DLRM_default,512,10.5,40\n"


def refusal(folder, text):
    (folder / "overheads").mkdir()
    path = folder / "overheads" / "t1_t2_by_op_model.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    out = folder / "out"
    out.mkdir()
    with pytest.raises(TraincastError) as caught:
        fit_host(folder, out, lambda step, share: None)
    assert list(out.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        ("T2,aten::add,DLRM_default,512,-3,40", "mean_us", "'-3'"),
        ("T2,aten::add,DLRM_default,512,nan,40", "mean_us", "'nan'"),
        ("T2,aten::add,DLRM_default,512,,40", "mean_us", "''"),
        ("T2,aten::add,DLRM_default,512,12us,40", "mean_us", "'12us'"),
        ("T2,aten::add,DLRM_default,0,10,40", "batch", "'0'"),
        ("T2,aten::add,DLRM_default,512,10,4.5", "count", "'4.5'"),
        ("T9,aten::add,DLRM_default,512,10,40", "type", "'T9'"),
        ("T2,aten::add", "model", "ends"),
    ],
)
def test_a_bad_value_is_named_by_file_row_and_column(tmp_path, row, column, value):
    message = refusal(tmp_path, NEWER + GOOD + row + "\n")
    assert f"'t1_t2_by_op_model.csv', row 1, column '{column}'" in message
    assert value in message


@pytest.mark.parametrize(
    ("text", "word"),
    [(NEWER, "no rows"), ("type,op\nT2,aten::add\n", "'model'"), ("", "'type'"), (b"\xff\xfe\x00", "cannot read")],
)
def test_a_table_that_is_none(tmp_path, text, word):
    message = refusal(tmp_path, text)
    assert "t1_t2_by_op_model.csv" in message
    assert word in message


def test_shipped_profile_is_what_the_tables_give(shared_data, tmp_path):
    fit_host(shared_data, tmp_path, lambda *_: None)
    date_profiles(tmp_path, Path(str(files("traincast.costs.host") / "data")))

    shipped = files("traincast.costs.host") / "data" / f"{PROFILE}.json"
    assert (tmp_path / f"{PROFILE}.json").read_text() == shipped.read_text()


def test_profiles_of_traces_are_what_the_traces_give(shared_data, tmp_path):
    fitted = fit_host_from_traces(shared_data, tmp_path, lambda *_: None)

    data = files("traincast.costs.host") / "data"
    date_profiles(tmp_path, Path(str(data)))
    for name in fitted:
        assert (tmp_path / f"{name}.json").read_text() == (data / f"{name}.json").read_text(), name


def test_how_types_changed_agrees_between_the_two_traces(shared_data, monkeypatch):
    def ratios(files):
        monkeypatch.setattr(host_versions, "TRACES", (files,))
        return build_study_profile(shared_data)["provenance"]["newer_over_older"]

    dlrm, recommender = (ratios(files) for files in host_versions.TRACES)
    for kind in ("T5", "alone"):
        assert dlrm[kind] == pytest.approx(recommender[kind], rel=0.2)
    assert dlrm["T3"] == pytest.approx(recommender["T3"], rel=0.5)


def test_missing_tables_are_named(tmp_path):
    with pytest.raises(TraincastError, match=r"t1_t2_by_op_model\.csv"):
        fit_host(tmp_path, tmp_path, lambda *_: None)


def row(op, model, mean, count, kind="T2"):
    return {"type": kind, "op": op, "model": model, "batch": "512", "mean_us": str(mean), "count": str(count)}


def test_the_median_counts_every_sample_as_often_as_it_was_taken():
    assert _compute_weighted_median([(1.0, 1), (2.0, 1), (9.0, 1)]) == 2.0
    assert _compute_weighted_median([(1.0, 1), (2.0, 1), (9.0, 5)]) == 9.0


def test_t2_is_the_median_over_models_and_the_spread_how_far_they_scatter():
    """Given an op that takes twice as long in one of two models; then the spread is that of their logarithms."""
    rows = [row("aten::add", "a", 10.0, 3), row("aten::add", "b", 20.0, 1), row("aten::mul", "a", 7.0, 1)]

    t2, spread = _compute_t2([*rows, row("aten::add", "a", 99.0, 50, kind="T1")])

    assert t2 == {"aten::add": 10.0, "aten::mul": 7.0}
    assert spread == pytest.approx((0.5 * 0.6931**2) ** 0.5, rel=1e-3)


def test_older_names_are_renamed_and_ops_that_launch_nothing_stand_apart(tmp_path):
    path = tmp_path / "older.csv"
    path.write_text(
        "snapshot,type,op,mean_us\n"
        "2021-04,T5,AddmmBackward,4\n2022-01,T5,AddmmBackward0,6\n"
        "2021-04,T5,aten::view,3\n2021-04,T5,aten::add,0\n"
        "2021-04,T3,aten::to,50\n2022-01,T3,aten::to,8\n"
    )

    tables = _read_older_tables(path)

    assert tables["T5"] == {"AddmmBackward0": 5.0}, "no time between launches means that there is one launch"
    assert tables["alone"] == {"aten::view": 3.0}
    assert tables["T3"] == {"aten::to": 8.0}


def test_ops_that_nobody_measured_get_the_median_of_their_kind():
    table = _add_defaults({"aten::b": 4.0, "aten::a": 2.0, "AddmmBackward0": 9.0})

    assert list(table) == ["AddmmBackward0", "aten::a", "aten::b", "*", "*Backward"]
    assert (table["*"], table["*Backward"]) == (3.0, 9.0)

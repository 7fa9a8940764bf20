"""The date of a profile: kept while its numbers are the same, today's when they are not."""

from __future__ import annotations

import json
import re
from datetime import date
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting import profile_fits as pieces
from traincast_evaluation.fitting.dates import date_profiles, read_fitting_date
from traincast_evaluation.kernels.fit import save_state

FIRST, LATER = "946684800", "1700000000"  # 2000-01-01 and 2023-11-14


def profile(folder: Path, number: float = 1.0, rows: int = 7) -> Path:
    folder.mkdir(exist_ok=True)
    save_state({"weights": np.array([number])}, {"sources": ["bench (MIT)"], "rows_fitted": rows}, folder / "conv")
    return folder


def fitted_on(day: str, monkeypatch: pytest.MonkeyPatch, made: Path, shipped: Path) -> str:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", day)
    date_profiles(made, shipped)
    return str(json.loads((made / "conv.json").read_text())["date"])


def test_a_first_fit_has_today_s_date(tmp_path, monkeypatch):
    assert fitted_on(FIRST, monkeypatch, profile(tmp_path / "made"), tmp_path / "nothing") == "2000-01-01"


def test_the_same_numbers_keep_the_date_and_every_byte(tmp_path, monkeypatch):
    shipped, again = profile(tmp_path / "shipped"), profile(tmp_path / "again")
    fitted_on(FIRST, monkeypatch, shipped, tmp_path / "nothing")

    assert fitted_on(LATER, monkeypatch, again, shipped) == "2000-01-01"
    for name in ("conv.json", "conv.npz"):
        assert (again / name).read_bytes() == (shipped / name).read_bytes()


@pytest.mark.parametrize("change", [{"number": 2.0}, {"rows": 8}], ids=["a number", "the provenance"])
def test_anything_else_that_differs_brings_today_s_date(tmp_path, monkeypatch, change):
    shipped, again = profile(tmp_path / "shipped"), profile(tmp_path / "again", **change)
    fitted_on(FIRST, monkeypatch, shipped, tmp_path / "nothing")

    assert fitted_on(LATER, monkeypatch, again, shipped) == "2023-11-14"


def test_a_profile_with_its_provenance_inside_is_dated_there_in_its_own_format(tmp_path, monkeypatch):
    text = '{\n "links": {},\n "provenance": {\n  "sources": ["a (MIT)"]\n },\n "curves": [\n{"ranks": 2}\n]}\n'
    for name in ("shipped", "again"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "links.json").write_text(text)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", FIRST)
    date_profiles(tmp_path / "shipped", tmp_path / "nothing")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", LATER)
    date_profiles(tmp_path / "again", tmp_path / "shipped")

    dated = (tmp_path / "again" / "links.json").read_text()
    assert dated == (tmp_path / "shipped" / "links.json").read_text()
    assert json.loads(dated)["provenance"] == {"date": "2000-01-01", "sources": ["a (MIT)"]}
    assert dated.replace('\n  "date": "2000-01-01",', "") == text


def test_without_an_epoch_the_clock_says_the_day(monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert abs((date.fromisoformat(read_fitting_date()) - date.today()).days) <= 1


def test_an_epoch_that_is_no_time_is_named(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(TraincastError, match="SOURCE_DATE_EPOCH is 'yesterday'"):
        read_fitting_date()


def test_fit_compares_with_the_shipped_profile_wherever_it_writes(tmp_path, monkeypatch):
    source = Path(str(files("traincast"))) / "costs" / "kernels" / "profiles"
    name = "softmax"

    def copied(self, data, out, progress):
        for suffix in (".json", ".npz"):
            (out / f"{name}{suffix}").write_bytes((source / f"{name}{suffix}").read_bytes())
        return {}

    monkeypatch.setattr(pieces.ProfileFit, "fit", copied)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", FIRST)
    pieces.fit_profiles([name], tmp_path, tmp_path / "out", lambda what, share: None)

    written = tmp_path / "out" / "costs" / "kernels" / "profiles" / f"{name}.json"
    assert written.read_bytes() == (source / f"{name}.json").read_bytes()


def test_every_shipped_profile_that_fit_writes_is_dated():
    root = Path(str(files("traincast")))
    for folder in {piece.folder for piece in pieces.PIECES.values()}:
        for path in (root / folder).glob("*.json"):
            data = json.loads(path.read_text(encoding="utf-8"))
            provenance = data.get("provenance", data)
            if provenance["sources"] != ["by definition"]:
                assert re.fullmatch(r"2\d{3}-\d{2}-\d{2}", provenance["date"]), path.name

"""What `traincast fit` rebuilds: every fitted profile of the package, all that were asked for or none."""

from __future__ import annotations

import errno
import os
from importlib.resources import files
from pathlib import Path

import pytest

from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting import profile_fits as pieces
from traincast_evaluation.fitting.profile_fits import PIECES, ProfileFit, fit_profiles
from traincast_evaluation.fitting.shipped import fit
from traincast_evaluation.kernels.families import MEASURED

SHIPPED = Path(str(files("traincast")))


def writes(name, fails=False):
    """A training that writes one small profile, or finds its data bad."""

    def train(data, out, progress):
        progress(f"reading {name}", 0.0)
        (out / f"{name}.json").write_text('{\n "provenance": {\n  "rows": 1\n }\n}\n')
        if fails:
            raise TraincastError(f"'{name}.csv', row 3, column 'us': -1 is not a positive number")
        progress(f"{name} done", 1.0)
        return {"rows": 1}

    return ProfileFit("kernels/profiles", lambda: train)


@pytest.fixture
def toys(monkeypatch):
    pytest.importorskip("threadpoolctl")
    monkeypatch.setattr(pieces, "PIECES", {"one": writes("one"), "two": writes("two"), "bad": writes("bad", True)})


def ignore(what, share):
    """Progress that nobody watches."""


def test_every_shipped_profile_has_the_piece_that_fits_it():
    profiles = {path.stem for path in (SHIPPED / "costs" / "kernels" / "profiles").glob("*.npz")}

    assert profiles == {measured.profile for measured in MEASURED}
    assert profiles < set(PIECES)
    assert all((SHIPPED / piece.folder).is_dir() for piece in PIECES.values())


def test_kernel_families_come_first_in_the_order_of_their_records():
    assert list(PIECES) == [
        "gemm", "elementwise", "softmax", "norm", "conv", "attention", "embedding",
        "collectives", "host", "host-traces", "overlap",
    ]  # fmt: skip


def test_pieces_are_written_into_the_folders_of_the_package(toys, tmp_path):
    written = fit_profiles(["one", "two"], tmp_path, tmp_path / "out", ignore)

    assert written == {"one": ["kernels/profiles/one.json"], "two": ["kernels/profiles/two.json"]}
    assert '"date"' in (tmp_path / "out" / "kernels" / "profiles" / "two.json").read_text()


def test_nothing_is_written_unless_every_piece_could_be_fitted(toys, tmp_path):
    with pytest.raises(TraincastError, match=r"'bad.csv', row 3, column 'us'"):
        fit_profiles(["one", "bad"], tmp_path, tmp_path / "out", ignore)

    assert not (tmp_path / "out").exists()


def test_an_unknown_piece_is_refused_before_anything_is_fitted(toys, tmp_path):
    heard = []
    with pytest.raises(TraincastError, match=r"unknown piece 'tow'.*two"):
        fit_profiles(["one", "tow"], tmp_path, tmp_path / "out", lambda what, share: heard.append(what))

    assert heard == []


def test_progress_goes_from_piece_to_piece(toys, tmp_path):
    heard = []
    fit_profiles(["one", "two"], tmp_path, tmp_path / "out", lambda what, share: heard.append((what, share)))

    assert heard == [("reading one", 0.0), ("one done", 0.5), ("reading two", 0.5), ("two done", 1.0)]


def test_a_full_disk_leaves_every_profile_as_it_was(toys, tmp_path, monkeypatch):
    folder = tmp_path / "out" / "kernels" / "profiles"
    folder.mkdir(parents=True)
    (folder / "one.json").write_text("before")
    synced, fsync = [], os.fsync

    def full_at_the_second(number):
        synced.append(number)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(number)

    monkeypatch.setattr("os.fsync", full_at_the_second)
    with pytest.raises(TraincastError, match="No space left"):
        fit_profiles(["one", "two"], tmp_path, tmp_path / "out", ignore)

    assert {path.name: path.read_text() for path in folder.iterdir()} == {"one.json": "before"}


def test_an_installed_package_is_written_to_only_on_request(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "traincast_evaluation.fitting.shipped.fit_profiles", lambda *arguments: asked.append(arguments) or {}
    )
    monkeypatch.setattr(
        "traincast_evaluation.fitting.shipped.files", lambda _: tmp_path / "site-packages" / "traincast"
    )

    with pytest.raises(TraincastError, match="`into_package`"):
        fit(["host"], tmp_path, None)
    assert asked == []
    fit(["host"], tmp_path, None, into_package=True)
    fit(["host"], tmp_path, tmp_path / "out")
    assert len(asked) == 2
    with pytest.raises(TraincastError, match="two places"):
        fit(["host"], tmp_path, tmp_path / "out", into_package=True)

"""The Python calls of the second distribution: their types, and the same documents as the command line."""

from __future__ import annotations

import pytest

import traincast_evaluation
from tests.app.test_api import check_shown, document, plain
from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting.shipped import FitResult
from traincast_evaluation.suites.registry import Evaluation


def test_evaluation_is_that_of_the_command_line(capsys, shared_data):
    result = traincast_evaluation.evaluate("cnn", data=shared_data)

    assert isinstance(result, Evaluation)
    assert plain(result) == document(capsys, "evaluate", "cnn", "--data", shared_data)
    assert result.mape == result.summary[0].mape
    assert result.frames()["cases"].height == len(result.outcomes)
    check_shown(result, starts="Evaluation: cnn")


def test_fit_is_that_of_the_command_line(capsys, tmp_path, monkeypatch):
    asked = []

    def fit_pieces(pieces, data, out, progress):
        asked.append((pieces, data, out))
        progress("host", 0.5)
        return {piece: [f"{piece}.json"] for piece in pieces}

    monkeypatch.setattr("traincast_evaluation.fitting.shipped.fit_profiles", fit_pieces)
    heard = []
    out = tmp_path / "out"
    result = traincast_evaluation.fit("host", "norm", "host", data=tmp_path, out=str(out), progress=heard.append)

    assert isinstance(result, FitResult)
    assert plain(result) == document(capsys, "fit", "host", "norm", "--data", tmp_path, "--out", tmp_path / "out")
    assert asked[0] == asked[1] == (["host", "norm"], tmp_path, tmp_path / "out")
    assert heard == [0.5]
    assert repr(result) == "FitResult: host: host.json\nnorm: norm.json"
    assert result.frames()["files"].rows() == [("host", "host.json"), ("norm", "norm.json")]


def test_measurements_must_be_somewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("TRAINCAST_DATA", raising=False)
    with pytest.raises(TraincastError, match="give `data` or set TRAINCAST_DATA"):
        traincast_evaluation.evaluate("cnn")
    with pytest.raises(TraincastError, match="is no folder of measurements"):
        traincast_evaluation.fit("host", data=tmp_path / "none")


def test_an_unknown_suite_names_the_nearest(tmp_path):
    with pytest.raises(TraincastError, match=r"unknown suite 'cn'. Did you mean cnn"):
        traincast_evaluation.evaluate("cn", data=tmp_path)
    with pytest.raises(TraincastError, match="leave out `roofline_only`"):
        traincast_evaluation.evaluate("kernels", data=tmp_path, roofline_only=True)

"""Steps of timm's models: captured on demand, kept, and predicted on a GPU from its data sheet."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.registry import evaluate, measures_here
from traincast_evaluation.suites.timm_steps import find_family, is_held_back
from traincast_evaluation.zoo.build.timm_models import TimmStep


def write_table(folder, rows):
    import polars as pl

    (folder / "iterations").mkdir()
    common = {"device": "NVIDIA GeForce RTX 3090", "precision": "amp_fp16", "torch_version": "1.12"}
    pl.DataFrame([{**common, **row} for row in rows]).write_parquet(folder / "iterations/timm_train_rtx3090.parquet")


def test_a_family_is_held_back_as_a_whole_whoever_trained_it():
    assert find_family("tf_efficientnet_b0") == find_family("efficientnet_b7") == "efficientnet"
    assert is_held_back("resnet") and not is_held_back("efficientnet")


def test_a_step_is_captured_once_and_an_unknown_model_is_left_out_by_name(tmp_path, monkeypatch):
    pytest.importorskip("polars")
    if find_spec("timm") is None or find_spec("torch") is None:
        pytest.skip("torch and timm are not installed: scripts/setup dev")
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path / "home"))
    row = {"model": "resnet10t", "batch": 64, "img_size": 176, "memory_format": "channels_last", "iteration_ms": 30.0}
    write_table(tmp_path, [row, {**row, "iteration_ms": 31.0}, {**row, "model": "nosuchnet"}])

    result = evaluate("timm", tmp_path)

    (outcome,) = result.outcomes
    assert outcome.case.measured_ms in (30.0, 31.0)
    assert 3.0 < outcome.predicted_ms < 60.0
    assert [left.reason for left in result.left_out] == ["timm 0.6.13 has no model 'nosuchnet'"]
    (kept,) = (tmp_path / "home" / "timm").rglob("*.tc")
    assert kept.name == "resnet10t-64-176-channels-last.tc"


def test_forward_passes_are_those_of_convolution_nets_that_were_not_compiled(tmp_path, monkeypatch):
    pl = pytest.importorskip("polars")
    if find_spec("timm") is None or find_spec("torch") is None:
        pytest.skip("torch and timm are not installed: scripts/setup dev")
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path / "home"))
    (tmp_path / "iterations").mkdir()
    row = {
        "model": "resnet10t", "batch": 64, "img_size": 176, "memory_format": "contiguous", "iteration_ms": 6.0,
        "device": "NVIDIA GeForce RTX 4090", "precision": "amp_fp16", "torch_version": "2.4.0", "compiled": False,
    }  # fmt: skip
    others = [
        {"compiled": True},
        {"device": "NVIDIA GeForce RTX 3090"},
        {"model": "vit_tiny_patch16_224", "img_size": 224},
    ]
    rows = [row, *({**row, **other} for other in others)]
    pl.DataFrame(rows).write_parquet(tmp_path / "iterations/timm_infer_rtx.parquet")

    result = evaluate("timm-inference", tmp_path)

    (outcome,) = result.outcomes
    assert 1.0 < outcome.predicted_ms < 12.0
    assert ["attention" in left.reason for left in result.left_out] == [True]


def test_it_stops_after_its_minutes_and_says_how_many_rows_are_left(tmp_path, monkeypatch):
    pytest.importorskip("polars")
    monkeypatch.setattr(TimmStep, "load", lambda step, version: "resnet50")
    row = {"batch": 64, "img_size": 176, "memory_format": "channels_last", "iteration_ms": 30.0}
    write_table(tmp_path, [{**row, "model": f"net{number}"} for number in range(3)])

    result = evaluate("timm", tmp_path, minutes=0.0)

    assert len(result.outcomes) == 1
    assert "1 of 3 rows" in result.notes[0]


def test_a_suite_that_never_stops_early_takes_no_minutes():
    with pytest.raises(TraincastError, match="`minutes` is for suites"):
        measures_here("dlrm", {"minutes": 1.0}, roofline_only=False)
    assert not measures_here("timm", {"minutes": 1.0}, roofline_only=False)

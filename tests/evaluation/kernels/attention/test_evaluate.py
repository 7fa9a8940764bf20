"""Attention against measurements that took no part in fitting."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.families import load_shipped_model
from traincast_evaluation.kernels.attention.evaluate import evaluate_attention
from traincast_evaluation.kernels.attention.measurements import read_encoder, read_trained


def test_rows_of_training_runs_and_of_encoders(shared_data):
    trained, encoder = read_trained(shared_data), read_encoder(shared_data)
    assert len(trained) == 64
    assert trained.calls.is_kind("backward").sum() == 32
    assert (encoder.calls["causal"] == 0).all()
    assert {device.key for device in encoder.devices} >= {"b200", "b300", "gb200", "gb300", "h100", "rtx-pro-6000"}
    model = load_shipped_model("attention")
    backward = trained.take(trained.calls.is_kind("backward"))
    shown, _ = backward.predicted(model.predict)
    assert np.median(np.abs(shown / backward.seconds - 1)) < 0.05


def test_evaluation_has_training_runs_and_encoders_that_nothing_was_fitted_to(shared_data):
    rows = {(row.suite, row.group): row for row in evaluate_attention(shared_data)}
    assert rows["attention in training runs", "b200 forward, never fitted"].gmae <= 10
    suite = "attention forward, no mask, above 100 us"
    assert max(rows[suite, key].gmae for key in ("h100", "h200", "b200", "gb200", "gb300")) <= 12


def test_accuracy_on_shapes_not_fitted(shared_data):
    from traincast_evaluation.kernels.attention.evaluate import evaluate_attention

    for row in evaluate_attention(shared_data):
        if "shapes never seen" in row.suite:
            assert row.gmae < 4.0, row
            assert row.mape < 7.0, row
            assert row.covered is not None
            assert 85 <= row.covered <= 95, row
        else:
            assert row.gmae < 17.0, row

"""Small models train, what they run is what is captured, and their ops alone take time."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from traincast.capturing.from_file import capture_function
from traincast_evaluation.trials.catalog import CNNS, TRANSFORMERS, draw_one_process_trials
from traincast_evaluation.trials.isolated import measure_isolated_seconds
from traincast_evaluation.trials.small_models import SMALL_MODELS
from traincast_evaluation.trials.steps import make_trial_step


def test_every_model_of_the_catalogue_is_defined():
    assert set(SMALL_MODELS) == {*TRANSFORMERS, *CNNS}


@pytest.mark.parametrize("name", ["gpt2-mini", "plain-mini"])
def test_a_small_model_runs_and_is_captured(name):
    make_step = make_trial_step(next(trial for trial in draw_one_process_trials(dlrms=1) if trial.name == name))
    step = make_step(1)
    step()
    assert measure_isolated_seconds(step) > 0
    program = capture_function(make_step, batch_size=1, rebatch=False).programs[0]
    kernels = {"gpt2-mini": "aten::native_layer_norm", "plain-mini": "aten::convolution"}
    assert kernels[name] in {op.name for op in program.ops}
    assert not any(op.name.startswith("aten::_foreach") for op in program.ops)

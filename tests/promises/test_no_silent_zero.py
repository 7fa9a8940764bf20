"""Promise: no part of an answer is a zero that stands for something unknown."""

from __future__ import annotations

import random

import pytest

from traincast.hardware.platform import list_device_keys
from traincast.models.catalog import list_models
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario

_HEAVY = ("gpt3-2.7b", "gpt3-xl", "switch-xl4", "opt-1.3b", "gpt2-large")
CASES = [(info.name, random.Random(info.name).choice(list_device_keys())) for info in list_models()
         if info.name not in _HEAVY]  # fmt: skip
TRIES = len(CASES)
"""Models, each on a GPU."""


@pytest.mark.parametrize(("model", "on"), CASES)
def test_every_part_of_a_step_takes_time_or_is_not_there(model, on):
    result = predict(Scenario(workload=model, on=on, batch_size=4))
    document = result.to_dict()

    assert all(seconds > 0 for seconds in result.by_family.values())
    assert result.iteration > 0 and result.host > 0 and result.throughput.flops > 0 and result.memory.peak_bytes > 0
    assert set(document["reasons"]) == {name for name, value in document.items() if value is None}

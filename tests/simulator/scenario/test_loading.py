"""Batches that come late, and copies from pageable memory."""

from __future__ import annotations

import pytest

from traincast.simulator.scenario.captured import Loader, make_inputs_pageable
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError


def ask(**loader):
    return predict(Scenario(workload="dlrm-mlperf", on="v100", batch_size=2048, **loader))


def test_workers_that_keep_up_change_nothing():
    assert ask(loader_ms=1.0, workers=4).iteration == ask().iteration
    assert ask(loader_ms=1.0, workers=4).warnings == ask().warnings


def test_workers_that_do_not_hold_the_step_up():
    result = ask(loader_ms=100.0, workers=4)
    assert result.iteration == pytest.approx(25e-3)
    assert result.device_idle == pytest.approx(25e-3 - result.device_active)
    assert any("the data loader holds the step up: a batch every 25 ms from 4 workers" in w for w in result.warnings)


def test_without_workers_the_training_process_makes_the_batch():
    plain, loaded = ask(), ask(loader_ms=10.0)
    # synchronised steps of the study: all of it comes on top
    assert loaded.iteration == pytest.approx(plain.iteration + 10e-3, rel=1e-6)
    assert any("begins 10 ms late" in warning for warning in loaded.warnings)


def test_pageable_copies_make_the_host_wait():
    workload = load_single_gpu_step(Scenario(workload="dlrm-v2", batch_size=2048))
    pageable = make_inputs_pageable(workload)
    kinds = [{spec.device for s in w.programs[0].symbolic for spec in s.inputs} for w in (workload, pageable)]
    assert "cpu:pinned" in kinds[0] and "cpu:pinned" not in kinds[1]
    question = Scenario(workload="dlrm-v2", on="h100", batch_size=2048)
    slow = predict(question.replace(pageable=True))
    assert slow.iteration > predict(question).iteration


@pytest.mark.parametrize(
    ("loader", "message"),
    [({"ms": -1.0}, "`loader_ms` -1"), ({"ms": float("nan")}, "`loader_ms` nan"), ({"workers": -1}, "`workers` -1")],
)
def test_impossible_loaders_are_refused(loader, message):
    with pytest.raises(TraincastError, match=message):
        Loader(**loader)

"""Published recommender steps: every row has a prediction, and the promised accuracy holds."""

from __future__ import annotations

import statistics

import pytest

from traincast.evaluation.cases import run_cases
from traincast.evaluation.distributed_embeddings import distributed_embeddings_cases
from traincast.evaluation.multi_gpu_dlrm import GROUPS, dlrm_cases


@pytest.fixture(scope="module")
def outcomes(shared_data):
    return run_cases(dlrm_cases(shared_data))


def _errors(outcomes, *groups: str) -> list[float]:
    names = {GROUPS[group] for group in groups}
    return [outcome.error_percent for outcome in outcomes if outcome.case.group in names]


def test_every_published_row_is_predicted(outcomes):
    assert len(outcomes) == 72 + 51
    assert {outcome.case.group for outcome in outcomes} == set(GROUPS.values())


def test_pytorch_rows_are_within_the_target(outcomes):
    errors = _errors(outcomes, "dle", "dle_old", "mlperf")
    assert len(errors) == 64
    assert statistics.median(map(abs, errors)) <= 15


def test_no_hugectr_step_is_faster_than_its_bound(outcomes):
    errors = _errors(outcomes, "hugectr", "pcie")
    assert len(errors) == 47
    assert max(errors) < 0


def test_distributed_embeddings_rows_are_within_the_target(shared_data):
    errors = [outcome.error_percent for outcome in run_cases(distributed_embeddings_cases(shared_data))]
    assert len(errors) == 7
    assert statistics.median(map(abs, errors)) <= 15
    assert max(map(abs, errors)) <= 30

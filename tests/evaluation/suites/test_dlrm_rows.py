"""Published recommender steps: every row has a prediction, and the promised accuracy holds."""

from __future__ import annotations

import statistics

import pytest

from traincast_evaluation.suites.cases import run_cases
from traincast_evaluation.suites.default_program import default_program_cases
from traincast_evaluation.suites.distributed_embeddings import distributed_embeddings_cases
from traincast_evaluation.suites.multi_gpu_dlrm import GROUPS, dlrm_cases


@pytest.fixture(scope="module")
def outcomes(shared_data):
    return run_cases(dlrm_cases(shared_data))


def _errors(outcomes, *groups: str) -> list[float]:
    names = {GROUPS[group] for group in groups}
    return [outcome.error_percent for outcome in outcomes if outcome.case.group in names]


def test_every_published_row_is_predicted(outcomes):
    assert len(outcomes) == 72 + 51 + 22
    assert {outcome.case.group for outcome in outcomes} == set(GROUPS.values())


def test_pytorch_rows_are_within_the_target(outcomes):
    errors = _errors(outcomes, "dle", "dle_old", "mlperf")
    assert len(errors) == 62
    assert statistics.median(map(abs, errors)) <= 15


def test_deep_learning_examples_from_2021_on_are_within_six_percent(outcomes):
    errors = _errors(outcomes, "dle")
    assert len(errors) == 40
    assert statistics.mean(map(abs, errors)) <= 6


@pytest.mark.parametrize(("group", "count", "mape"), [("dcnv2", 19, 10), ("dcnv2_nodes", 5, 15)])
def test_dcnv2_rows_of_hugectr_are_within_their_targets(outcomes, group, count, mape):
    errors = _errors(outcomes, group)
    assert len(errors) == count
    assert statistics.mean(map(abs, errors)) <= mape


def test_rows_of_one_nvlink_node_are_close_but_for_a_few_slow_submissions(outcomes):
    errors = _errors(outcomes, "hugectr")
    assert statistics.median(map(abs, errors)) <= 10


def test_the_default_program_stands_beside_every_configuration(shared_data):
    cases = default_program_cases(shared_data)
    assert len(cases) == 17
    assert sum(int(case.name.rpartition("(")[2].split()[0]) for case in cases) == 51 + 22
    # one of them: eight H100 with DCNv2
    (case,) = [case for case in cases if case.name.startswith("dlrm-v2 on 1 x 8 h100")]
    (outcome,) = run_cases([case])
    assert (case.question.workload, case.question.gpus, case.question.dtype) == ("dlrm-v2", 8, "fp16")
    assert outcome.predicted_ms > 2 * case.measured_ms
    assert "measured was HugeCTR" in case.note and "eager PyTorch" in case.note
    assert 0 < outcome.exposed_comm_ms < outcome.active_ms


def test_steps_on_several_gpus_lie_inside_their_intervals(outcomes):
    several = [o.covered for o in outcomes if len(o.case.question.workload.ranks) > 1]
    assert 0.84 <= statistics.mean(several) <= 0.95


def test_distributed_embeddings_rows_are_within_the_target(shared_data):
    errors = [outcome.error_percent for outcome in run_cases(distributed_embeddings_cases(shared_data))]
    assert len(errors) == 7
    assert statistics.median(map(abs, errors)) <= 15
    assert max(map(abs, errors)) <= 30

"""The table of steps on several GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from traincast.simulator.scenario.scenario import Scenario
from traincast_evaluation.suites import multi_gpu
from traincast_evaluation.suites.cases import Case, Outcome, run_cases
from traincast_evaluation.suites.multi_gpu_dlrm import GROUPS


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr(multi_gpu, "_has_torch", lambda: False)


def test_the_data_parallel_transformer(shared_data, without_torch):
    (case,) = multi_gpu.transformer_cases(shared_data)
    assert case.question.gpus == 4
    asked = case.question
    assert (asked.batch_size, asked.seq_len, asked.optimizer) == (1, 1024, "none")
    (outcome,) = run_cases([case])
    assert abs(outcome.error_percent) < 15
    assert outcome.covered
    assert abs(outcome.error_percent) < abs(case.others["NeuSight"])


def test_what_needs_torch_is_named(without_torch):
    (note,) = multi_gpu.multi_gpu_notes()
    assert "torch is missing" in note


def test_with_torch_nothing_is_left_out(monkeypatch):
    monkeypatch.setattr(multi_gpu, "_has_torch", lambda: True)
    assert multi_gpu.multi_gpu_notes() == ()


def test_only_pytorch_counts_among_all(monkeypatch):
    def outcome(group, predicted):
        case = Case(name=group, group=group, question=Scenario(workload="dlrm-default", on="v100"), measured_ms=10.0)
        return Outcome(case=case, predicted_ms=predicted, low_ms=1.0, high_ms=20.0, active_ms=1.0)

    monkeypatch.setattr(multi_gpu, "summarise_replayed_ranks", lambda suite, data: [])
    outcomes = [outcome(GROUPS["dle"], 11.0), outcome(GROUPS["mlperf"], 9.0), outcome(GROUPS["hugectr"], 4.0)]
    rows = multi_gpu.summarise_multi_gpu("multi-gpu", outcomes, Path())
    assert [(row.group, row.n, round(row.mape)) for row in rows] == [
        ("all PyTorch: step", 2, 10),
        (GROUPS["dle"], 1, 10),
        (GROUPS["mlperf"], 1, 10),
        (GROUPS["hugectr"], 1, 60),
        (f"{GROUPS['hugectr']}: rows looked at", 1, 60),
    ]

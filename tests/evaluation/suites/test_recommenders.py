"""Rows of recommenders: what is predicted, what is left out and why, and how a pair is told."""

import pytest

from traincast.models.dlrm.config import DLRM_DEFAULT
from traincast.models.dlrm.program import build_dlrm_workload
from traincast_evaluation.suites import recommenders
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, run_cases
from traincast_evaluation.suites.published import Row
from traincast_evaluation.suites.torchrec_rows import find_captured_step

STEPS = """set,model,device,num_gpus,batch_per_gpu,precision,iteration_ms
torchrec,Maglev pipeline full,NVIDIA H100 (variant not stated),8,,see file,362.5
torchrec,TestSparseNN sdd_base,NVIDIA GB200,2,32768,fp32,323
torchrec,TestSparseNN sdd_base,NVIDIA Unheard Of,2,32768,fp32,323
hugectr_sok,DLRM,NVIDIA V100 (memory size and form not stated),8,8192,amp,12.1
"""
PAIRS = """pr,yaml,name,batch_size,iteration_ms_p90
4066.0,sparse_data_dist_base,sparse_data_dist_base,32768,4
4066.0,sparse_data_dist_base,sparse_data_dist_sync_fwd,32768,4.8
4017.0,sparse_data_dist_base,baseline,32768,4.4
4017.0,sparse_data_dist_base,clear_inputs,32768,4.4
4002.0,sparse_data_dist_base,sparse_data_dist_baseline,32768,4
"""


def test_rows_are_predicted_or_left_out_with_a_reason(tmp_path, monkeypatch):
    (tmp_path / "iterations").mkdir()
    (tmp_path / "iterations" / "recommender_steps.csv").write_text(STEPS)
    (tmp_path / "iterations" / "torchrec_pipeline_memory.csv").write_text(PAIRS)
    workload = build_dlrm_workload(DLRM_DEFAULT)
    monkeypatch.setattr(recommenders, "load_captured_step", lambda name: workload)

    cases = recommenders.list_recommender_cases(tmp_path)

    reasons = [case.reason for case in cases if isinstance(case, LeftOut)]
    assert sum("not among those of the table" in reason for reason in reasons) == 1
    assert sum("unknown device 'NVIDIA Unheard Of'" in reason for reason in reasons) == 1
    assert sum("TensorFlow under XLA" in reason for reason in reasons) == 1
    assert sum("lacks one of its rows" in reason for reason in reasons) == 13
    step, far, near = (case for case in cases if isinstance(case, Case))
    assert (step.group, step.measured_ms) == ("TorchRec", 323)
    outcomes = run_cases([far, near])
    assert "+20.0% measured" in far.name and far.tags["change"] == "beyond the spread"
    assert near.tags["change"] == "within the spread"
    assert far.measured_ms == pytest.approx(1.2 * outcomes[0].predicted_ms)  # the same program before and after
    summary = recommenders.summarise_recommenders("recommenders", outcomes)
    told = "before and after, beyond the spread (sign right in 0, size in 0 of 1)"
    assert [row.group for row in summary] == ["before and after", told]


@pytest.mark.parametrize(
    ("after", "told"), [(1.24, "sign right in 1, size in 1"), (1.05, "sign right in 1, size in 0")]
)
def test_a_change_is_told_by_its_sign_and_its_size(after, told):
    # Given a step that took 1.2 times as long after a change, when it is predicted, then both are counted
    case = Case(
        name="", group="before and after", question=None, measured_ms=12.0,
        tags={"change": "beyond the spread", "before_ms": "10"},
    )  # fmt: skip
    outcome = Outcome(case=case, predicted_ms=10 * after, low_ms=9.0, high_ms=14.0, active_ms=0.0)

    (*_, row) = recommenders.summarise_recommenders("recommenders", [outcome])

    assert told in row.group


@pytest.mark.parametrize(
    ("name", "pull_request", "step"),
    [
        ("sparse_data_dist_free_input_inplace", "4002.0", "before-free_inplace"),
        ("sparse_data_dist_base_after", "4008.0", "newest-base"),
        ("sparse_data_dist_sync_fwd", "4066.0", "newest-sync_fwd"),
    ],
)
def test_a_row_is_of_the_step_of_its_release(name, pull_request, step):
    cells = {"name": name, "pr": pull_request, "yaml": "sparse_data_dist_base", "batch_size": "32768.0"}

    assert find_captured_step(Row("table", 1, cells)) == step
    assert find_captured_step(Row("table", 1, {**cells, "batch_size": "16384"})) is None

"""Rows of recommenders: what is predicted, what is left out and why, and how a pair is told."""

import pytest

pytest.importorskip("torchrec")

from traincast.models.dlrm.config import DLRM_DEFAULT
from traincast.models.dlrm.program import build_dlrm_workload
from traincast_evaluation.suites import recommenders
from traincast_evaluation.suites.cases import Case, LeftOut, run_cases

STEPS = """set,model,device,num_gpus,batch_per_gpu,precision,iteration_ms
torchrec,Maglev pipeline full,NVIDIA H100 (variant not stated),8,,see file,362.5
torchrec,TestSparseNN sdd_base,NVIDIA GB200,2,32768,fp32,323
torchrec,TestSparseNN sdd_base,NVIDIA Unheard Of,2,32768,fp32,323
hugectr_sok,DLRM,NVIDIA V100 (memory size and form not stated),8,8192,amp,12.1
"""
PAIRS = """pr,date,name,batch_size,world_size,gpu_runtime_ms_p90,peak_allocated_kmib_p90
4066.0,2026-04-08,sparse_data_dist_base,64,2,100,43.3
4066.0,2026-04-08,sparse_data_dist_sync_fwd,64,2,120,43.3
4002.0,2026-04-03,sparse_data_dist_baseline,64,2,110,43.3
"""


def test_rows_are_predicted_or_left_out_with_a_reason(tmp_path, monkeypatch):
    (tmp_path / "iterations").mkdir()
    (tmp_path / "iterations" / "recommender_steps.csv").write_text(STEPS)
    (tmp_path / "iterations" / "torchrec_pipeline_memory.csv").write_text(PAIRS)
    workload = build_dlrm_workload(DLRM_DEFAULT)
    monkeypatch.setattr(recommenders, "capture_pipeline", lambda *args: workload)

    cases = recommenders.list_recommender_cases(tmp_path)

    reasons = [case.reason for case in cases if isinstance(case, LeftOut)]
    assert sum("not among those of the table" in reason for reason in reasons) == 1
    assert sum("unknown device 'NVIDIA Unheard Of'" in reason for reason in reasons) == 1
    assert sum("TensorFlow under XLA" in reason for reason in reasons) == 1
    assert sum("lacks one of its rows" in reason for reason in reasons) == 6
    step, pair = (case for case in cases if isinstance(case, Case))
    assert (step.group, step.measured_ms) == ("TorchRec", 323)
    outcomes = run_cases([pair])
    assert "+20.0% measured" in pair.name and pair.tags["change"] == "beyond the spread"
    assert pair.measured_ms == pytest.approx(1.2 * outcomes[0].predicted_ms)  # the same program before and after
    summary = recommenders.summarise_recommenders("recommenders", outcomes)
    assert [row.group for row in summary] == ["before and after", "before and after, beyond the spread"]

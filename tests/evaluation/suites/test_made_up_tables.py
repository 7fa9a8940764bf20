"""Cases from small made-up tables: what a row asks for, and what is wrong with one that asks for too much."""

from __future__ import annotations

import pytest

from tests.evaluation.suites.folders import CNN, DLE, DLRM, EMBEDDINGS, FOUR_GPUS, MLPERF, TRANSFORMER, write_rows
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites import multi_gpu
from traincast_evaluation.suites.distributed_embeddings import distributed_embeddings_cases
from traincast_evaluation.suites.multi_gpu_dlrm import GROUPS
from traincast_evaluation.suites.multi_gpu_dlrm import dlrm_cases as published_dlrm_cases
from traincast_evaluation.suites.single_gpu import cnn_cases, dlrm_cases, transformer_cases


def test_a_row_of_the_dlrm_study_runs_at_its_locked_clock(tmp_path):
    (case,) = dlrm_cases(write_rows(tmp_path, "dlrm_single_gpu", DLRM))

    assert (case.name, case.group) == ("DLRM_default 512", "Tesla V100-SXM2-16GB")
    assert (case.measured_ms, case.measured_active_ms, case.stops_at) == (5.0, 2.5, "")
    assert case.others == {"reference": -6.9, "kernels only": -53.7}
    question = case.question
    assert (question.workload, question.on, question.clock_mhz) == ("dlrm-default", "v100", 1297.0)
    assert question.batch_size == 512


def test_a_row_of_the_cnn_study_stops_its_clock_before_gradients_are_zeroed(tmp_path):
    (case,) = cnn_cases(write_rows(tmp_path, "cnn_single_gpu", CNN))

    assert (case.question.workload, case.stops_at) == ("resnet50", "Optimizer.zero_grad#SGD.zero_grad")
    assert case.others == {"|reference|": 5.0, "|Habitat|": 8.0}


@pytest.mark.parametrize(
    ("changes", "variant", "name"),
    [
        ({}, Scenario(batch_size=2, seq_len=512, mode="training", optimizer="none"), "bert_large train 2x512"),
        ({"mode": "inf"}, Scenario(batch_size=2, seq_len=512, mode="inference"), "bert_large inf 2x512"),
        (
            {"mode": "inf", "compiled": "true"},
            Scenario(batch_size=2, seq_len=512, mode="inference", compiled=True),
            "bert_large inf 2x512 compiled",
        ),
    ],
)
def test_a_transformer_trains_without_an_optimizer_or_serves(tmp_path, changes, variant, name):
    (case,) = transformer_cases(write_rows(tmp_path, "transformers_single_gpu", {**TRANSFORMER, **changes}))

    assert case.question == variant.replace(workload="bert-large", on="a100-40gb-pcie")
    assert case.name == name
    assert case.others == {"NeuSight": pytest.approx(10.0)}, "the roofline has no figure in this row"


@pytest.mark.parametrize(
    ("cases", "table", "row", "message"),
    [
        (dlrm_cases, "dlrm_single_gpu", {**DLRM, "model": "DLRM_huge"}, "unknown model 'DLRM_huge'"),
        (dlrm_cases, "dlrm_single_gpu", {**DLRM, "iteration_ms": "0"}, "row 1, column 'iteration_ms': '0' is not"),
        (dlrm_cases, "dlrm_single_gpu", {**DLRM, "device": "Tesla T400"}, "'Tesla T400'"),
        (cnn_cases, "cnn_single_gpu", {**CNN, "batch": "many"}, "column 'batch': 'many' is not a number"),
        (transformer_cases, "transformers_single_gpu", {**TRANSFORMER, "model": "t5"}, "unknown model 't5'"),
        (transformer_cases, "transformers_single_gpu", {**TRANSFORMER, "device": "Tesla V10"}, "unknown device"),
        (multi_gpu.transformer_cases, "transformers_4gpu", {**FOUR_GPUS, "device": "TPU"}, "unknown device 'TPU'"),
        (multi_gpu.transformer_cases, "transformers_4gpu", {**FOUR_GPUS, "num_gpus": "0"}, "column 'num_gpus'"),
        (distributed_embeddings_cases, "distributed_embeddings", {**EMBEDDINGS, "model": "vast"}, "model 'vast'"),
    ],
)  # fmt: skip
def test_a_row_that_nobody_knows_is_named(tmp_path, cases, table, row, message):
    (left_out,) = cases(write_rows(tmp_path, table, row))
    assert message in left_out.reason
    assert "\n" not in left_out.reason


def test_a_table_without_a_column_is_refused_as_a_whole(tmp_path):
    with pytest.raises(TraincastError, match="has no column 'model'"):
        dlrm_cases(write_rows(tmp_path, "dlrm_single_gpu", {"device": "x"}))


def test_a_data_parallel_row_divides_its_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(multi_gpu, "_has_torch", lambda: False)
    divided = {**FOUR_GPUS, "strategy": "tp"}

    (case,) = multi_gpu.transformer_cases(write_rows(tmp_path, "transformers_4gpu", FOUR_GPUS, divided))

    assert (case.name, case.group) == ("gpt2_large dp 4, batch 4", "Transformers, NVIDIA A100-SXM4-40GB")
    assert (case.question.on, case.question.gpus, case.question.batch_size) == ("dgx-a100", 4, 1)
    assert case.others == {"NeuSight": pytest.approx(10.0)}


def published(folder, dle=DLE, mlperf=MLPERF):
    write_rows(folder, "dle_dlrm", dle)
    return published_dlrm_cases(write_rows(folder, "mlperf_dlrm", mlperf))


@pytest.mark.parametrize(
    ("changes", "group", "dtype"),
    [
        ({}, "dle", "fp32"),
        ({"readme_date": "2020-07-04"}, "dle_old", "fp32"),
        ({"framework": "tensorflow2"}, "dle_tf", "fp32"),
        ({"precision": "tf32"}, "dle", "tf32"),
    ],
)
def test_rows_of_deep_learning_examples_fall_into_groups_by_code(tmp_path, changes, group, dtype):
    case, _ = published(tmp_path, {**DLE, **changes})

    assert (case.group, case.question.dtype) == (GROUPS[group], dtype)
    assert case.question.on.device.key == "a100-40gb"
    assert len(case.question.workload.ranks) == case.question.on.gpus_per_node == 8


def test_one_gpu_of_a_node_has_no_links(tmp_path):
    case, _ = published(tmp_path, {**DLE, "num_gpus": "1"})

    assert (case.question.on.topology, case.question.on.gpus_per_node) == (None, 1)


@pytest.mark.parametrize(
    ("changes", "group", "device", "program"),
    [
        ({}, "mlperf", "a100-40gb", "nvidia-dlrm-mlperf"),
        ({"framework": "Merlin HugeCTR"}, "hugectr", "a100-40gb", "hugectr-dlrm-2020"),
        # the container's name says nothing of the program: from round 1.0 on it is HugeCTR
        ({"mlperf_round": "v1.0"}, "hugectr", "a100-40gb", "hugectr-dlrm-2021"),
        ({"mlperf_round": "v2.0", "framework": "", "accelerator": "NVIDIA A100-PCIe-80GB"},
         "pcie", "a100-80gb-pcie", "hugectr-dlrm"),
        ({"mlperf_round": "v3.1", "benchmark": "dlrm_dcnv2", "accelerator": "NVIDIA H100-SXM5-80GB"},
         "dcnv2", "h100", "hugectr-dlrm-dcnv2"),
        ({"mlperf_round": "v3.1", "benchmark": "dlrm_dcnv2", "accelerator": "NVIDIA H100-SXM5-80GB",
          "gpus_per_node": "4", "num_nodes": "2"}, "dcnv2_nodes", "h100", "hugectr-dlrm-dcnv2"),
    ],
)  # fmt: skip
def test_rows_of_mlperf_decide_their_hardware_and_their_program(tmp_path, changes, group, device, program):
    row = {**MLPERF, **changes}
    _, case = published(tmp_path, mlperf=row)

    on = case.question.on
    assert (case.group, on.device.key, case.question.workload.name) == (GROUPS[group], device, program)
    assert len(case.question.workload.ranks) == 8
    assert on.gpus_per_node == on.topology.gpus_per_node == int(row["gpus_per_node"])


def test_a_system_that_was_held_back_says_so(tmp_path):
    _, case = published(tmp_path, mlperf={**MLPERF, "system": "D74H-7U"})
    assert case.name == "v0.7 Somebody D74H-7U x8 (held back)"


def test_a_row_of_distributed_embeddings_is_the_program_of_its_model(tmp_path):
    (case,) = distributed_embeddings_cases(write_rows(tmp_path, "distributed_embeddings", EMBEDDINGS))

    assert (case.name, case.measured_ms) == ("tiny x1", 20.0)
    assert case.question.on.topology is None
    assert case.question.dtype == "tf32"
    assert case.question.host.name == "tensorflow"

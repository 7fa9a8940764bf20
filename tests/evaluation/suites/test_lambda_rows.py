"""Lambda's rows as scenarios: which program, board, links and host each of them is."""

from __future__ import annotations

import csv

import pytest

from traincast.capturing import capture_step
from traincast.hardware.platform import Platform
from traincast.simulator.scenario.scenario import Scenario
from traincast_evaluation.suites import lambda_rows
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, run_cases
from traincast_evaluation.zoo.build.lambda_steps import make_lambda_step

ROW = {
    "device": "NVIDIA GeForce RTX 3090", "num_gpus": "8.0", "model": "bert_base_squad", "precision_label": "FP16",
    "global_batch": "64", "batch_per_gpu": "8.0", "torch_version": "1.13.0a0+d0d6b1f", "nvlink_note": "",
    "host_cpu": "AMD EPYC 7302 16-Core Processor", "iteration_ms": "200", "precision": "amp_fp16", "quality": "A",
}  # fmt: skip


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads rows like `ROW` but for these fields; every program is a small one."""
    small = capture_step(make_lambda_step("ncf", "fp32"), batch_size=4096, name="small")
    monkeypatch.setattr(lambda_rows, "_capture_any_version", lambda *_: small)

    def read_rows(*changes):
        folder = tmp_path / "iterations"
        folder.mkdir(exist_ok=True)
        with (folder / lambda_rows.FILE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ROW)
            writer.writeheader()
            writer.writerows({**ROW, **change} for change in changes)
        return lambda_rows.lambda_cases(tmp_path)

    return read_rows


def get_scenario(case) -> tuple[Scenario, Platform]:
    assert isinstance(case, Case)
    scenario = case.question if isinstance(case.question, Scenario) else case.question().scenario
    assert isinstance(scenario.on, Platform)
    return scenario, scenario.on


def test_a_row_decides_its_host_its_links_and_its_version(read):
    (case,) = read({})
    scenario, platform = get_scenario(case)
    assert (scenario.host, scenario.gpus, scenario.batch_size) == ("AMD EPYC 7302 16-Core Processor", 8, 8)
    assert platform.topology is not None and not platform.topology.peer_access
    assert scenario.workload.framework_version == "1.13"
    assert case.name.endswith(lambda_rows.HELD_BACK)


def test_a_row_from_a_machine_that_hides_its_cpu_is_predicted_with_the_usual_one(read):
    (case,) = read({"host_cpu": "Common KVM processor", "device": "GeForce RTX 2070 SUPER", "torch_version": "2.6.0a0"})
    scenario, platform = get_scenario(case)
    assert (scenario.host, platform.device.key) == (None, "rtx-2070-super")


def test_bert_reduces_its_gradients_after_backward(read):
    several, one = read({}, {"num_gpus": "1.0"})
    assert several.question().bucket_mb > 1e4, "one bucket holds all"
    assert isinstance(one.question, Scenario)


def test_processes_of_transformer_xl_exchange_nothing(read):
    (case,) = read({"model": "transformerxlbase"})
    scenario, platform = get_scenario(case)
    assert (scenario.gpus, platform.topology, case.tags["gpus"]) == (1, None, "8")


def test_a_bridge_joins_two_cards(read):
    plain, bridged = read(*({"device": "GeForce RTX 2080 Ti", "nvlink_note": note} for note in ("", "NVLink bridge")))
    assert [get_scenario(case)[1].topology.island for case in (plain, bridged)] == [1, 2]


def test_an_epoch_of_a_few_steps_is_left_out_with_its_reason(read):
    (row,) = read({"model": "ncf", "quality": "C: epoch of 1 to 5 iterations, do not use"})
    assert isinstance(row, LeftOut)
    assert "one to five iterations" in row.reason


def test_rows_are_summed_up_by_gpus_program_board_and_host(read, tmp_path):
    outcomes = [o for o in run_cases(read({"num_gpus": "1.0"}, {}), roofline_only=True) if isinstance(o, Outcome)]
    groups = [row.group for row in lambda_rows.summarise_lambda("lambda", outcomes, tmp_path)]
    assert groups[0] == "one GPU"
    for group in ("several GPUs, boards held back", "one GPU, bert_base_squad", "board NVIDIA GeForce RTX 3090"):
        assert group in groups
    assert "host AMD EPYC 7302 16-Core Processor" in groups

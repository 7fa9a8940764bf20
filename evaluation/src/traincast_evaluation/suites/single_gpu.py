"""Whole steps on one GPU as published: the DLRM and CNN study, and NeuSight's Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from traincast.hardware.platform import find_device_by_name
from traincast.simulator.scenario.scenario import Mode, Scenario
from traincast_evaluation.suites.cases import Case, LeftOut
from traincast_evaluation.suites.published import Row, read_cases

# MHz at which the study locked the SM clocks of its machines, as its notes on them say; those of others float
_STUDY_CLOCK_MHZ = {"Tesla V100-SXM2-16GB": 1297.0, "Tesla P100-PCIE-16GB": 1189.0, "NVIDIA TITAN Xp": 1404.0}
TRANSFORMERS = {
    "bert_large": "bert-large", "gpt2_large": "gpt2-large", "gpt3_xl": "gpt3-xl", "gpt3_27": "gpt3-2.7b",
    "opt_13": "opt-1.3b", "switchxl4": "switch-xl4",
}  # fmt: skip
"""Built-in models by NeuSight's names."""
_MODES: dict[str, Mode] = {"inf": "inference", "train": "training"}
_COMPILED = {"true": True, "false": False}


def dlrm_cases(data: Path) -> list[Case | LeftOut]:
    """The DLRM study: three models at four batch sizes."""
    names = {"DLRM_default": "dlrm-default", "DLRM_MLPerf": "dlrm-mlperf", "DLRM_DDP": "dlrm-ddp"}
    others = {"reference": "ref_err_e2e_pct", "kernels only": "ref_err_kernel_only_pct"}

    def case_of(row: Row) -> Case:
        return replace(_make_study_case(row, names, others), measured_active_ms=row.positive("gpu_active_ms_implied"))

    return read_cases(data / "iterations" / "dlrm_single_gpu.csv", case_of)


def cnn_cases(data: Path) -> list[Case | LeftOut]:
    """The CNN part of the study: ResNet-50 and Inception-v3, timed from forward to the end of the update."""
    names = {"ResNet50": "resnet50", "Inception-V3": "inception-v3"}
    others = {"|reference|": "ref_abs_err_pct", "|Habitat|": "habitat_abs_err_pct"}

    def case_of(row: Row) -> Case:
        return replace(_make_study_case(row, names, others), stops_at="Optimizer.zero_grad#SGD.zero_grad")

    return read_cases(data / "iterations" / "cnn_single_gpu.csv", case_of)


def transformer_cases(data: Path) -> list[Case | LeftOut]:
    """NeuSight's Transformers; four of them ran under torch.compile."""
    return read_cases(data / "iterations" / "transformers_single_gpu.csv", _make_neusight_case)


def _make_neusight_case(row: Row) -> Case:
    measured, mode = row.positive("e2e_ms"), row.known("mode", _MODES)
    others = {
        name: 100 * (row.positive(column) / measured - 1)
        for name, column in (("NeuSight", "neusight_pred_e2e_ms"), ("roofline", "roofline_pred_e2e_ms"))
        if row[column]
    }
    request = Scenario(
        workload=row.known("model", TRANSFORMERS),
        on=find_device_by_name(row["device"]).key,
        batch_size=row.count("batch"),
        seq_len=row.count("seq_len"),
        mode=mode,
        optimizer=None if mode == "inference" else "none",
        compiled=row.known("compiled", _COMPILED),
    )
    name = f"{row['model']} {row['mode']} {row['batch']}x{row['seq_len']}" + " compiled" * request.compiled
    return Case(name=name, group=row["device"], question=request, measured_ms=measured, others=others)


def _make_study_case(row: Row, names: Mapping[str, str], others: Mapping[str, str]) -> Case:
    """A row of the study, whose models are built in under these `names`; `others` are columns of others' errors."""
    return Case(
        name=f"{row['model']} {row['batch']}",
        group=row["device"],
        question=Scenario(
            workload=row.known("model", names),
            on=find_device_by_name(row["device"]).key,
            batch_size=row.count("batch"),
            clock_mhz=_STUDY_CLOCK_MHZ.get(row["device"]),
        ),
        measured_ms=row.positive("iteration_ms"),
        others={name: row.signed(column) for name, column in others.items()},
    )

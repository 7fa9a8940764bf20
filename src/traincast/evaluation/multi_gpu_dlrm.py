"""Published DLRM steps on one and several GPUs: DeepLearningExamples and MLPerf."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from traincast.evaluation.cases import Case
from traincast.evaluation.published import rows_of
from traincast.platform.catalog import device_by_name, load_device
from traincast.platform.platform import Platform, load_platform
from traincast.programs.published.catalog import published_programs
from traincast.questions.predict import Question
from traincast.questions.variant import Variant
from traincast.workload.workload import Workload

_NODES = {"DGX A100": "dgx-a100", "DGX-1": "dgx1-v100", "DGX-2": "dgx2-v100"}
_SIZES = {"small": "nvidia-dlrm", "large": "nvidia-dlrm-large"}
_DTYPES = {"amp_fp16": "fp16", "tf32": "tf32", "fp32": "fp32"}
GROUPS = {
    "dle": "DeepLearningExamples, PyTorch",
    "dle_old": "DeepLearningExamples, PyTorch before 2021 (older code)",
    "dle_tf": "DeepLearningExamples, TensorFlow 2 (as if it were the PyTorch code)",
    "mlperf": "MLPerf DLRM, PyTorch",
    "hugectr": "MLPerf DLRM, HugeCTR or not said (lower bound)",
    "pcie": "MLPerf DLRM, PCIe without NVLink (lower bound)",
}


def dlrm_cases(data: Path) -> list[Case]:
    """Every row of `dle_dlrm.csv` and `mlperf_dlrm.csv`, from its published configuration."""
    return [*_dle_cases(data), *_mlperf_cases(data)]


def _dle_cases(data: Path) -> list[Case]:
    cases = []
    for row in rows_of(data / "iterations" / "dle_dlrm.csv"):
        gpus, batch, dtype = row.count("num_gpus"), row.count("global_batch"), row.known("precision", _DTYPES)
        group = "dle_tf" if row["framework"] != "pytorch" else "dle_old" if row["readme_date"] < "2021" else "dle"
        cases.append(
            Case(
                name=f"{row['system']} x{gpus} {row['precision']} {batch} ({row['readme_date']})",
                group=GROUPS[group],
                question=Question(
                    workload=_workload(row.known("model_size", _SIZES), gpus, batch, dtype),
                    on=_platform(row.known("system", _NODES), row["device"], gpus),
                    variant=Variant(dtype="tf32" if dtype == "tf32" else "fp32"),
                ),
                measured_ms=row.positive("iteration_ms"),
            )
        )
    return cases


def _mlperf_cases(data: Path) -> list[Case]:
    """PyTorch's rows as its published code runs them; of the others only the dense part is predicted."""
    cases = []
    for row in rows_of(data / "iterations" / "mlperf_dlrm.csv"):
        gpus, batch = row.count("num_gpus"), row.count("global_batch")
        card = "40" if "40GB" in row["accelerator"] or row["accelerator"] == "NVIDIA A100" else "80"
        pcie = "PCI" in row["accelerator"].upper()
        key = f"a100-{card}gb-pcie" if pcie else f"a100-{card}gb"
        if row["framework"].startswith("PyTorch"):
            group = "mlperf"
            platform = replace(load_platform("dgx-a100"), device=load_device(key))
            question = Question(workload=_workload("nvidia-dlrm-mlperf", gpus, batch, "fp16"), on=platform)
        else:
            group = "pcie" if pcie else "hugectr"
            name = "hugectr-dlrm-dcnv2" if row["benchmark"] == "dlrm_dcnv2" else "hugectr-dlrm"
            question = Question(workload=_workload(name, 1, batch // gpus, "fp16"), on=key, host="cuda-graph")
        cases.append(
            Case(
                name=f"{row['mlperf_round']} {row['submitter']} {row['system']} x{gpus}",
                group=GROUPS[group],
                question=question,
                measured_ms=row.positive("iteration_ms"),
            )
        )
    return cases


def _platform(node: str, device: str, gpus: int) -> Platform:
    """The node with this device; alone when only one GPU is used."""
    node_platform = replace(load_platform(node), device=device_by_name(device))
    return node_platform if gpus > 1 else replace(node_platform, topology=None, gpus_per_node=1)


@cache
def _workload(name: str, gpus: int, global_batch: int, dtype: str) -> Workload:
    return published_programs()[name].step(gpus=gpus, global_batch=global_batch, dtype=dtype)

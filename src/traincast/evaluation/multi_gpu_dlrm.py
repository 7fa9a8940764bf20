"""Published DLRM steps on one and several GPUs: DeepLearningExamples and MLPerf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from traincast.embeddings import Pooling, Table, Zipf
from traincast.evaluation.iterations import Case
from traincast.evaluation.published import rows_of, settings_of
from traincast.platform.catalog import device_by_name, load_device
from traincast.platform.platform import Platform, load_platform
from traincast.programs.published.hugectr import dense_bound
from traincast.programs.published.nvidia_dlrm import Run, nvidia_dlrm
from traincast.questions.predict import Question
from traincast.questions.variant import Variant
from traincast.workload.workload import Workload

_NODES = {"DGX A100": "dgx-a100", "DGX-1": "dgx1-v100", "DGX-2": "dgx2-v100"}
_SKEW = 1.05  # assumed: the Criteo data is skewed, and how much is not published
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
    configs = settings_of(data / "iterations" / "dlrm_configs.yaml")
    return [*_dle_cases(data, configs), *_mlperf_cases(data, configs)]


def _dle_cases(data: Path, configs: dict[str, Any]) -> list[Case]:
    sizes = configs["nvidia_deep_learning_examples"]["model_sizes"]
    cases = []
    for row in rows_of(data / "iterations" / "dle_dlrm.csv"):
        gpus, batch, half = int(row["num_gpus"]), int(row["global_batch"]), row["precision"] == "amp_fp16"
        rows = tuple(sizes[row["model_size"]]["rows_per_table"])
        group = "dle_tf" if row["framework"] != "pytorch" else "dle_old" if row["readme_date"] < "2021" else "dle"
        cases.append(
            Case(
                name=f"{row['system']} x{gpus} {row['precision']} {batch} ({row['readme_date']})",
                group=GROUPS[group],
                question=Question(
                    workload=_workload(rows, gpus, batch, half, half, True),
                    on=_platform(_NODES[row["system"]], row["device"], gpus),
                    variant=Variant(dtype="tf32" if row["precision"] == "tf32" else "fp32"),
                ),
                measured_ms=float(row["iteration_ms"]),
            )
        )
    return cases


def _mlperf_cases(data: Path, configs: dict[str, Any]) -> list[Case]:
    """PyTorch's rows as its published code runs them; of the others only the dense part is predicted."""
    cases = []
    for row in rows_of(data / "iterations" / "mlperf_dlrm.csv"):
        gpus, batch = int(row["num_gpus"]), int(row["global_batch"])
        card = "40" if "40GB" in row["accelerator"] or row["accelerator"] == "NVIDIA A100" else "80"
        pcie = "PCI" in row["accelerator"].upper()
        key = f"a100-{card}gb-pcie" if pcie else f"a100-{card}gb"
        if row["framework"].startswith("PyTorch"):
            rows = tuple(configs["mlperf"]["dlrm"]["rows_per_table"])
            group = "mlperf"
            platform = replace(load_platform("dgx-a100"), device=load_device(key))
            question = Question(workload=_workload(rows, gpus, batch, True, False, False), on=platform)
        else:
            group = "pcie" if pcie else "hugectr"
            bound = dense_bound(batch // gpus, cross=row["benchmark"] == "dlrm_dcnv2")
            question = Question(workload=bound, on=key, host="cuda-graph")
        cases.append(
            Case(
                name=f"{row['mlperf_round']} {row['submitter']} {row['system']} x{gpus}",
                group=GROUPS[group],
                question=question,
                measured_ms=float(row["iteration_ms"]),
            )
        )
    return cases


def _platform(node: str, device: str, gpus: int) -> Platform:
    """The node with this device; alone when only one GPU is used."""
    node_platform = replace(load_platform(node), device=device_by_name(device))
    return node_platform if gpus > 1 else replace(node_platform, topology=None, gpus_per_node=1)


@cache
def _workload(rows: tuple[int, ...], gpus: int, batch: int, half: bool, casts: bool, synchronised: bool) -> Workload:
    run = Run(gpus=gpus, global_batch=batch, half=half, casts=casts, synchronised=synchronised)
    return nvidia_dlrm(_tables(rows), run)


def _tables(rows: Sequence[int]) -> list[Table]:
    return [
        Table(name=f"t{i}", rows=count, dim=128, pooling=Pooling.constant(1), access=Zipf(_SKEW))
        for i, count in enumerate(rows)
    ]

"""Published DLRM steps on one and several GPUs: DeepLearningExamples and MLPerf."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from traincast.errors import unknown
from traincast.evaluation.cases import Case, LeftOut
from traincast.evaluation.published import Row, cases_of
from traincast.platform.catalog import device_by_name, load_device
from traincast.platform.platform import Platform, load_platform
from traincast.programs.published.catalog import published_programs
from traincast.questions.predict import Question
from traincast.questions.variant import Variant
from traincast.workload.workload import Workload

_NODES = {"DGX A100": "dgx-a100", "DGX-1": "dgx1-v100", "DGX-2": "dgx2-v100"}
_SIZES = {"small": "nvidia-dlrm", "large": "nvidia-dlrm-large"}
_DTYPES = {"amp_fp16": "fp16", "tf32": "tf32", "fp32": "fp32"}
_FRAMEWORKS = {"pytorch": True, "tensorflow": False, "tensorflow2": False}  # whether it is PyTorch
_BENCHMARKS = {"dlrm": "hugectr-dlrm", "dlrm_dcnv2": "hugectr-dlrm-dcnv2"}
_MEMORY = ("40", "80")  # GB that an A100 was sold with
GROUPS = {
    "dle": "DeepLearningExamples, PyTorch",
    "dle_old": "DeepLearningExamples, PyTorch before 2021 (older code)",
    "dle_tf": "DeepLearningExamples, TensorFlow 2 (as if it were the PyTorch code)",
    "mlperf": "MLPerf DLRM, PyTorch",
    "hugectr": "MLPerf DLRM, HugeCTR or not said (lower bound)",
    "pcie": "MLPerf DLRM, PCIe without NVLink (lower bound)",
}


def dlrm_cases(data: Path) -> list[Case | LeftOut]:
    """Every row of `dle_dlrm.csv` and `mlperf_dlrm.csv`, from its published configuration."""
    folder = data / "iterations"
    return [*cases_of(folder / "dle_dlrm.csv", _dle), *cases_of(folder / "mlperf_dlrm.csv", _mlperf)]


def _dle(row: Row) -> Case:
    gpus, batch, dtype = row.count("num_gpus"), row.count("global_batch"), row.known("precision", _DTYPES)
    pytorch = row.known("framework", _FRAMEWORKS)
    group = "dle_tf" if not pytorch else "dle_old" if row["readme_date"] < "2021" else "dle"
    return Case(
        name=f"{row['system']} x{gpus} {row['precision']} {batch} ({row.label('readme_date')})",
        group=GROUPS[group],
        question=Question(
            workload=_workload(row.known("model_size", _SIZES) + ("-2021" if row["readme_date"] < "2022" else ""), gpus, batch, dtype),
            on=_platform(row.known("system", _NODES), row["device"], gpus),
            variant=Variant(dtype="tf32" if dtype == "tf32" else "fp32"),
        ),
        measured_ms=row.positive("iteration_ms"),
    )


def _mlperf(row: Row) -> Case:
    """A row of PyTorch as its published code runs it; of the others only the dense part is predicted."""
    gpus, batch = row.count("num_gpus"), row.count("global_batch")
    key = _accelerator(row)
    pcie = key.endswith("-pcie")
    program = row.known("benchmark", _BENCHMARKS)
    if row["framework"].startswith("PyTorch"):
        group = "mlperf"
        platform = replace(load_platform("dgx-a100"), device=load_device(key))
        question = Question(workload=_workload("nvidia-dlrm-mlperf", gpus, batch, "fp16"), on=platform)
    else:
        group = "pcie" if pcie else "hugectr"
        question = Question(workload=_workload(program, 1, batch // gpus, "fp16"), on=key, host="cuda-graph")
    return Case(
        name=f"{row.label('mlperf_round')} {row.label('submitter')} {row.label('system')} x{gpus}",
        group=GROUPS[group],
        question=question,
        measured_ms=row.positive("iteration_ms"),
    )


def _accelerator(row: Row) -> str:
    """The key of the row's A100, of which the first round does not say the memory: it had 40 GB."""
    text = row["accelerator"].upper()
    memory = [size for size in _MEMORY if f"{size}GB" in text] or (["40"] if text == "NVIDIA A100" else [])
    if "A100" not in text or len(memory) != 1:
        keys = [f"a100-{size}gb{kind}" for size in _MEMORY for kind in ("", "-pcie")]
        place = f"It stands in '{row.file}', row {row.number}; the programs are written for {', '.join(keys)}."
        raise unknown("accelerator", row.label("accelerator"), keys, place)
    return f"a100-{memory[0]}gb" + ("-pcie" if "PCI" in text else "")


def _platform(node: str, device: str, gpus: int) -> Platform:
    """The node with this device; alone when only one GPU is used."""
    node_platform = replace(load_platform(node), device=device_by_name(device))
    return node_platform if gpus > 1 else replace(node_platform, topology=None, gpus_per_node=1)


@cache
def _workload(name: str, gpus: int, global_batch: int, dtype: str) -> Workload:
    return published_programs()[name].step(gpus=gpus, global_batch=global_batch, dtype=dtype)

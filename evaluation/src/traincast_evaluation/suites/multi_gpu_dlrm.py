"""Published DLRM steps on one and several GPUs: DeepLearningExamples and MLPerf. A row decides its own hardware and
program; what is not known is rejected by name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from traincast.hardware.platform import (
    Platform,
    add_default_links,
    find_device_by_name,
    load_device,
    load_platform,
)
from traincast.ir.workload import Workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError, make_unknown_error
from traincast_evaluation.published.catalog import published_programs
from traincast_evaluation.suites.cases import Case, LeftOut
from traincast_evaluation.suites.machines import find_named_device, read_machine
from traincast_evaluation.suites.published import Row, read_cases

_NODES = {"DGX A100": "dgx-a100", "DGX-1": "dgx1-v100", "DGX-2": "dgx2-v100"}
_SIZES = {
    "small": "nvidia-dlrm", "large": "nvidia-dlrm-large", "xlarge": "nvidia-dlrm-xlarge",
    "extra large": "nvidia-dlrm-xlarge",
}  # fmt: skip
_DTYPES = {"amp_fp16": "fp16", "tf32": "tf32", "fp32": "fp32"}
_FRAMEWORKS = {"pytorch": True, "tensorflow": False, "tensorflow2": False}  # whether it is PyTorch
_AUTOCAST_SINCE = "2022"  # README dates before this one are of the code with Apex O2
_RELAYS_SINCE = "2021"  # README dates before this one are of containers with NCCL before 2.8
# NVIDIA's programs by MLPerf round: from 1.0 on all that ran on its GPUs is HugeCTR, whatever container a row names
_ROUNDS = {
    "v0.7": "hugectr-dlrm-2020", "v1.0": "hugectr-dlrm-2021",
    **dict.fromkeys(("v1.1", "v2.0", "v2.1"), "hugectr-dlrm"),
    **dict.fromkeys(("v3.0", "v3.1", "v4.0", "v4.1", "v5.0", "v5.1"), "hugectr-dlrm-dcnv2"),
}  # fmt: skip
_BENCHMARKS = {
    "dlrm": ("hugectr-dlrm-2020", "hugectr-dlrm-2021", "hugectr-dlrm"),
    "dlrm_dcnv2": ("hugectr-dlrm-dcnv2",),
}
# words of the texts by which submitters name NVIDIA's containers or HugeCTR; some say nothing
_CONTAINERS = ("HUGECTR", "MERLIN", "NGC", "NVIDIA", "MXNET", "PYTORCH")
_WITHOUT_PEERS = dict.fromkeys(("hugectr-dlrm", "hugectr-dlrm-2021"), "hugectr-dlrm-2020")
FILES = ("mlperf_dlrm.csv", "mlperf_dlrm_dcnv2_h100.csv")
"""Tables of MLPerf rows; older folders of measurements have only the first."""
HELD_BACK = frozenset((
    "AS-4124GO-NART+", "AS-8125GS-TNHR", "D74H-7U", "ESC-N8-E11", "ESC_N8A-E12",
    "G492-ZD2_A100_20210517.merlin_hugectr", "G492-ZD2_hugectr",
    "HPE-ProLiant-XL675d-Gen10-Plus_A100-SXM-80GB_hugectr", "R5300G5x8A100-PCIE-80GB", "SR670v2_4xA100-SXM4-80GB",
    "SYS-420GP-TNAR+", "SYS-821GE-TNHR-1", "as-2124gq-nart+", "as-4142gs-tnr", "dgxa100_n14_ngc21.05_merlin_hugectr",
    "dgxa100_n8_ngc21.09_merlin_hugectr", "dgxa100_ngc21.05_merlin_hugectr", "dgxa100_ngc21.09_merlin_hugectr",
    "dgxa100_ngc22.04_merlin_hugectr", "dgxh100_n8_ngc23.04_merlin_hugectr", "dgxh100_ngc23.04_merlin_hugectr",
    "eos_n8_ngc24.04_merlin_hugectr", "gx_A100-SXMx8_hugectr_NGC_22.04", "nf5688m6_hugectr",
))  # fmt: skip
"""Systems of HugeCTR rows, two fifths of each kind, drawn by a seed before any row was looked at: their steps took no
part in writing the programs."""
GROUPS = {
    "dle": "DeepLearningExamples, PyTorch",
    "dle_old": "DeepLearningExamples, PyTorch before 2021 (older code)",
    "dle_tf": "DeepLearningExamples, TensorFlow 2 (as if it were the PyTorch code)",
    "mlperf": "MLPerf DLRM, PyTorch",
    "hugectr": "MLPerf DLRM, HugeCTR, one NVLink node",
    "hugectr_nodes": "MLPerf DLRM, HugeCTR, several nodes",
    "dcnv2": "MLPerf DCNv2, HugeCTR, one NVLink node",
    "dcnv2_nodes": "MLPerf DCNv2, HugeCTR, several nodes",
    "pcie": "MLPerf DLRM, HugeCTR, PCIe without NVLink",
}


def dlrm_cases(data: Path) -> list[Case | LeftOut]:
    """Every row of `dle_dlrm.csv` and of MLPerf's tables, from its published configuration."""
    folder = data / "iterations"
    tables = [folder / FILES[0], *(path for path in (folder / file for file in FILES[1:]) if path.is_file())]
    mlperf = [case for table in tables for case in read_cases(table, _make_mlperf_case)]
    return [*read_cases(folder / "dle_dlrm.csv", _make_dle_case), *mlperf]


def _make_dle_case(row: Row) -> Case:
    gpus, batch, dtype = row.count("num_gpus"), row.count("global_batch"), row.known("precision", _DTYPES)
    pytorch, date = row.known("framework", _FRAMEWORKS), row["readme_date"]
    group = "dle_tf" if not pytorch else "dle_old" if date < "2021" else "dle"
    name = row.known("model_size", _SIZES)
    name += "-2021" if pytorch and date < _AUTOCAST_SINCE and f"{name}-2021" in published_programs() else ""
    platform = _load_dlrm_platform(_NODES.get(row["system"], ""), row["device"], gpus)
    if platform.topology is not None and date < _RELAYS_SINCE:
        platform = replace(platform, topology=replace(platform.topology, relays=False))
    return Case(
        name=f"{row.label('system')} x{gpus} {row['precision']} {batch} ({row.label('readme_date')})",
        group=GROUPS[group],
        question=Scenario(
            workload=_build_dlrm_workload(name, gpus, batch, dtype, platform.gpus_per_node),
            on=platform,
            dtype="tf32" if dtype == "tf32" else "fp32",
        ),
        measured_ms=row.positive("iteration_ms"),
    )


def _make_mlperf_case(row: Row) -> Case:
    """A row as the program of its round runs it, on the machine that it names."""
    platform, program = read_machine(row), choose_program(row)
    if platform.key.endswith("-no-peer"):  # HugeCTR's hybrid embedding reads the memory of peers
        program = _WITHOUT_PEERS.get(program, program)
    gpus, batch = row.count("num_gpus"), row.count("global_batch")
    name = f"{row.label('mlperf_round')} {row.label('submitter')} {row.label('system')} x{gpus}"
    return Case(
        name=name + (" (held back)" if row["system"] in HELD_BACK else ""),
        group=GROUPS[_choose_group(program, platform, gpus)],
        question=Scenario(
            workload=_build_dlrm_workload(program, gpus, batch, "fp16", platform.gpus_per_node), on=platform
        ),
        measured_ms=row.positive("iteration_ms"),
    )


def _choose_group(program: str, platform: Platform, gpus: int) -> str:
    if program == "nvidia-dlrm-mlperf":
        return "mlperf"
    if platform.device.key.endswith("-pcie"):
        return "pcie"
    kind = "dcnv2" if program == "hugectr-dlrm-dcnv2" else "hugectr"
    return f"{kind}_nodes" if gpus > platform.gpus_per_node else kind


def choose_program(row: Row) -> str:
    """The program that an MLPerf row ran: NVIDIA's PyTorch code of round 0.7, or HugeCTR as of its round."""
    named = row.known("benchmark", _BENCHMARKS)
    program, text = row.known("mlperf_round", _ROUNDS), row["framework"].upper()
    if program not in named:
        raise TraincastError(
            f"'{row.file}', row {row.number}: round {row['mlperf_round']} had no benchmark '{row['benchmark']}'; "
            "correct the row"
        )
    if text and not any(word in text for word in _CONTAINERS):
        place = f"It stands in '{row.file}', row {row.number}; known are texts with {', '.join(_CONTAINERS)}."
        raise make_unknown_error("framework", row.label("framework"), _CONTAINERS, place)
    return "nvidia-dlrm-mlperf" if row["mlperf_round"] == "v0.7" and text.startswith("PYTORCH") else program


def _load_dlrm_platform(node: str, device: str, gpus: int) -> Platform:
    """The node with this device, or the device with the links usual for it; alone when only one GPU is used."""
    found = load_device(key) if (key := find_named_device(device)) else find_device_by_name(device)
    platform = load_platform(node).with_device(found) if node else add_default_links(load_platform(found.key))
    return platform if gpus > 1 else replace(platform, topology=None, gpus_per_node=1)


@cache
def _build_dlrm_workload(name: str, gpus: int, global_batch: int, dtype: str, gpus_per_node: int) -> Workload:
    program = published_programs()[name]
    return program.step(gpus=gpus, global_batch=global_batch, dtype=dtype, gpus_per_node=gpus_per_node)

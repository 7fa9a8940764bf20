"""A user's path, `predict("dlrm-mlperf", gpus=N, dtype="fp16")` with the default program, alongside the steps it can
stand for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from traincast.simulator.scenario.scenario import Scenario, list_scenario_fields
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.cases import Case
from traincast_evaluation.suites.machines import read_machine
from traincast_evaluation.suites.multi_gpu_dlrm import FILES
from traincast_evaluation.suites.published import Row, read_rows

GROUP = "TorchRec's program, the default, alongside MLPerf's steps of the same model (others ran them)"
_MODELS = {"dlrm": "dlrm-mlperf", "dlrm_dcnv2": "dlrm-v2"}
_REASON = (
    "measured was {others}: fused layers, rows and collectives in half precision, embeddings alongside the dense "
    "part, no "
    "host in the way; predicted is eager PyTorch: autocast with a kernel per op and per cast, fp32 rows and exchanges, "
    "whole tables by lookups, DDP"
)


@dataclass(frozen=True, slots=True)
class _Configuration:
    """What rows have in common that one prediction stands for."""

    model: str
    accelerator: str
    per_node: int
    gpus: int
    batch: int


def default_program_cases(data: Path) -> list[Case]:
    """One case per configuration of MLPerf's rows: the median of their steps; rows that nobody knows are left out here
    and named where each is predicted as its own program."""
    alike: dict[_Configuration, list[Row]] = {}
    for path in (data / "iterations" / file for file in FILES):
        for row in read_rows(path) if path.is_file() else []:
            try:
                alike.setdefault(_read_configuration(row), []).append(row)
            except TraincastError:
                continue
    return [_make_default_case(configuration, rows) for configuration, rows in alike.items()]


def _read_configuration(row: Row) -> _Configuration:
    machine = read_machine(row)
    gpus, batch = row.count("num_gpus"), row.count("global_batch")
    row.positive("iteration_ms")
    list_scenario_fields()["batch_size"].check(batch // gpus)
    return _Configuration(
        row.known("benchmark", _MODELS), machine.device.key, machine.gpus_per_node, gpus, batch // gpus
    )


def _make_default_case(configuration: _Configuration, rows: list[Row]) -> Case:
    nodes = configuration.gpus // configuration.per_node
    others = "NVIDIA's PyTorch code or HugeCTR" if configuration.model == "dlrm-mlperf" else "HugeCTR"
    return Case(
        name=f"{configuration.model} on {nodes} x {configuration.per_node} {configuration.accelerator}, "
        f"{configuration.batch} per GPU ({len(rows)} rows)",
        group=GROUP,
        question=Scenario(
            workload=configuration.model,
            on=read_machine(rows[0]),
            gpus=configuration.gpus,
            batch_size=configuration.batch,
            dtype="fp16",
        ),
        measured_ms=median(row.positive("iteration_ms") for row in rows),
        note=_REASON.format(others=others),
    )

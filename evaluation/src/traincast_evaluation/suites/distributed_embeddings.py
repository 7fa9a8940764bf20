"""Published steps of NVIDIA-Merlin/distributed-embeddings' synthetic models on DGX A100."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from traincast.costs.host.profile import TENSORFLOW, load_host_profile
from traincast.hardware.platform import load_device, load_platform
from traincast.simulator.scenario.scenario import Scenario
from traincast_evaluation.published.catalog import published_programs
from traincast_evaluation.suites.cases import Case, LeftOut
from traincast_evaluation.suites.published import Row, read_cases

_PREFIX = "distributed-embeddings-"
_NODES = {"NVIDIA A100-SXM4 (DGX A100)": "dgx-a100"}


def distributed_embeddings_cases(data: Path) -> list[Case | LeftOut]:
    """Every row of `distributed_embeddings.csv`, from the program's published sizes."""
    host = load_host_profile(TENSORFLOW)
    programs = {
        name.removeprefix(_PREFIX): program
        for name, program in published_programs().items()
        if name.startswith(_PREFIX)
    }

    def case_of(row: Row) -> Case:
        gpus, program = row.count("num_gpus"), row.known("model", programs)
        node = replace(load_platform(row.known("device", _NODES)), device=load_device("a100-80gb"))
        return Case(
            name=f"{row['model']} x{gpus}",
            group="DGX A100",
            question=Scenario(
                workload=program.step(gpus=gpus, global_batch=row.count("global_batch"), dtype="tf32"),
                on=node if gpus > 1 else replace(node, topology=None, gpus_per_node=1),
                dtype="tf32",
                host=host,
            ),
            measured_ms=row.positive("iteration_ms"),
        )

    return read_cases(data / "iterations" / "distributed_embeddings.csv", case_of)

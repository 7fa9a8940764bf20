"""Published steps of NVIDIA-Merlin/distributed-embeddings' synthetic models on DGX A100."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from traincast.evaluation.iterations import Case
from traincast.evaluation.published import rows_of, settings_of
from traincast.host.profile import HostProfile, load_host_profile
from traincast.platform.catalog import load_device
from traincast.platform.platform import load_platform
from traincast.programs.published.distributed_embeddings import Model, tensorflow_workload
from traincast.programs.published.distributed_embeddings_tables import Group, place
from traincast.questions.predict import Question
from traincast.questions.variant import Variant

_HOROVOD_CYCLE_SECONDS = 1e-3  # its default: how often it looks for tensors that all ranks have ready


def distributed_embeddings_cases(data: Path) -> list[Case]:
    """Every row of `distributed_embeddings.csv`, from the published table specifications."""
    folder = data / "iterations"
    models = settings_of(folder / "distributed_embeddings_specs.yaml")["models"]
    node = replace(load_platform("dgx-a100"), device=load_device("a100-80gb"))
    host = tensorflow_host()
    cases = []
    for row in rows_of(folder / "distributed_embeddings.csv"):
        gpus, spec = int(row["num_gpus"]), models[row["model"]]
        groups = [Group(g["tables"], g["rows"], g["dim"], tuple(g["lookups"])) for g in spec["groups"]]
        model = Model(
            mlp=tuple(spec["mlp"]), dense_features=spec["dense_features"], stride=spec["interact_stride"] or 0
        )
        cases.append(
            Case(
                name=f"{row['model']} x{gpus}",
                group="DGX A100",
                question=Question(
                    workload=tensorflow_workload(model, place(groups, gpus), int(row["global_batch"])),
                    on=node if gpus > 1 else replace(node, topology=None, gpus_per_node=1),
                    variant=Variant(dtype="tf32"),
                    host=host,
                ),
                measured_ms=float(row["iteration_ms"]),
            )
        )
    return cases


def tensorflow_host() -> HostProfile:
    """A server whose executor costs what autograd's engine does, and Horovod, for which an op waits half a cycle."""
    server = load_host_profile("server-2022")
    wait = 0.5 * _HOROVOD_CYCLE_SECONDS
    return replace(server, name="tensorflow", t2={**server.t2, "HorovodAlltoall": wait, "HorovodAllreduce": wait})

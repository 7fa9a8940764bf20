"""Which program trains a recommender on many GPUs: TorchRec's unless another is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traincast.ir.workload import Workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.hardware.platform import Platform
    from traincast.models.dlrm.config import DlrmConfig

TORCHREC, PIPELINED = "torchrec", "torchrec-pipelined"
_PUBLISHED = {
    ("dlrm-mlperf", "hugectr"): "hugectr-dlrm",
    ("dlrm-mlperf", "nvidia"): "nvidia-dlrm-mlperf",
    ("dlrm-v2", "hugectr"): "hugectr-dlrm-dcnv2",
}


def list_programs(model: str) -> tuple[str, ...]:
    """The programs of a recommender, the default first."""
    return TORCHREC, PIPELINED, *(program for name, program in _PUBLISHED if name == model)


def check_eager(name: str, gpus: int, scenario: Scenario) -> None:
    """Rejects what the step of a recommender with sharded tables is not predicted as."""
    if scenario.is_compiled:
        raise TraincastError(
            f"{name} on {gpus} GPUs shards its tables; such a step is not predicted compiled: leave out `compiled`, or "
            "ask for one GPU and no `program`"
        )


def build_recommender(
    config: DlrmConfig, gpus: int, platform: Platform, scenario: Scenario, program: str | None
) -> tuple[Workload, str]:
    """A recommender's step on `gpus` GPUs under a program, and what is to be said about it."""
    from traincast.simulator.scenario.dlrm_file import load_described_dlrm  # names of programs need no programs
    from traincast.simulator.scenario.recommenders import build_hybrid_variant

    check_eager(config.name, gpus, scenario)
    wanted = program or TORCHREC
    if wanted not in list_programs(config.name):
        raise TraincastError(
            f"{config.name} was not published with the program '{wanted}'; `program` is one of "
            f"{', '.join(list_programs(config.name))}"
        )
    if wanted not in (TORCHREC, PIPELINED):
        from traincast.models.published import find_published_program
        from traincast.simulator.scenario.published import build_published_step

        published = find_published_program(_PUBLISHED[config.name, wanted])
        if config != load_described_dlrm(config.name):
            raise TraincastError(
                f"{published.name} is one published program: it trains {config.name} as built in, not with other "
                f"tables, MLPs or lookups; give `program` {TORCHREC} or {PIPELINED}"
            )
        step, notes = build_published_step(published, gpus, scenario, platform.gpus_per_node)
        return step, "; ".join(note for note in (f"{config.name} as {published.name} runs it", notes) if note)
    step, notes = build_hybrid_variant(config, gpus, platform, scenario, pipelined=wanted == PIPELINED)
    others = ", ".join(name for name in list_programs(config.name) if name != TORCHREC)
    return step, notes if program else f"{notes}; this is TorchRec's program, `program` has others: {others}"


def shard_workload(workload: Workload, gpus: int, platform: Platform, program: str | None) -> tuple[Workload, str]:
    """A step that trains FBGEMM tables on `gpus` GPUs under a program, and what is to be said about it."""
    wanted = program or TORCHREC
    if wanted not in (TORCHREC, PIPELINED):
        raise TraincastError(
            f"{workload.name} was not published with the program '{wanted}'; `program` is one of "
            f"{', '.join(list_programs(workload.name))}"
        )
    from traincast.models.sharded_dlrm.recommender import build_sharded_recommender

    step, notes = build_sharded_recommender(
        workload,
        gpus,
        memory_bytes=platform.device.memory_bytes,
        gpus_per_node=platform.gpus_per_node,
        pipelined=wanted == PIPELINED,
    )
    return step, notes if program else f"{notes}; this is TorchRec's program, `program` has another: {PIPELINED}"


def make_no_program_error(name: str) -> TraincastError:
    """What is asked to choose a program and has none."""
    return TraincastError(
        f"{name} has no programs to choose from: only recommenders that train FBGEMM tables eagerly have (DLRMs by "
        "name or in YAML, hstu, onetrans, din, deepfm, wide-deep); leave out `program`"
    )

"""Which program trains a recommender on many GPUs (TorchRec's unless another is asked for), published programs by
name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.ir.edit import remove_phase
from traincast.ir.ops import Phase
from traincast.ir.workload import Workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.hardware.platform import Platform
    from traincast.models.dlrm.config import DlrmConfig
    from traincast.models.placement.plan import Plan
    from traincast.models.published import PublishedProgram

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

    check_eager(config.name, gpus, scenario)
    wanted = program or TORCHREC
    if wanted not in list_programs(config.name):
        raise TraincastError(
            f"{config.name} was not published with the program '{wanted}'; `program` is one of "
            f"{', '.join(list_programs(config.name))}"
        )
    if wanted not in (TORCHREC, PIPELINED):
        from traincast.models.published import find_published_program

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


def build_published_step(
    program: PublishedProgram, gpus: int, scenario: Scenario, gpus_per_node: int = 8
) -> tuple[Workload, str]:
    """One training step on `gpus` GPUs, and what is to be said about it; choices that it does not have are rejected."""
    for option in ("seq_len", "optimizer", "attention", "embedding"):
        choice = getattr(scenario, option)
        if choice is not None:
            raise TraincastError(f"{program.name} is one published program: leave out `{option}`")
    if not scenario.trains_eagerly:
        raise TraincastError(f"{program.name} is a training step as published; it has no inference and is not compiled")
    batch = None if scenario.batch_size is None else gpus * scenario.batch_size
    asked = scenario.dtype or "fp32"
    dtype = program.dtype_for(asked)
    notes = [program.note] if program.note else []
    if dtype != asked:
        notes.append(f"{program.name} runs in {dtype}, as published")
    step = program.step(gpus=gpus, global_batch=batch, dtype=dtype, gpus_per_node=gpus_per_node)
    return step, "; ".join(notes)


def find_published_host(program: PublishedProgram) -> HostProfile | None:
    """The host that a published program runs on; None when the platform's will do."""
    if not program.host:
        return None
    return load_host_profile(program.host)


AUTOCAST: dict[str | None, str] = {None: "", "fp32": "", "tf32": "", "bf16": "bfloat16", "fp16": "float16"}


def build_hybrid_variant(
    config: DlrmConfig, gpus: int, platform: Platform, scenario: Scenario, *, pipelined: bool = False,
    plan: Plan | None = None,
) -> tuple[Workload, str]:  # fmt: skip
    """`build_hybrid_dlrm` in a scenario, and what was assumed; what such a step does not have is rejected."""
    from traincast.models.sharded_dlrm.hybrid import build_hybrid_dlrm  # steps of one GPU need neither
    from traincast.models.sharded_dlrm.step import check_ranks

    if scenario.embedding not in (None, "fbgemm"):
        raise TraincastError(f"tables on several GPUs are FBGEMM's, not '{scenario.embedding}'; leave out `embedding`")
    if scenario.optimizer not in (None, "none"):
        config = replace(config, optimizer=scenario.optimizer)
    if scenario.dtype not in AUTOCAST:
        raise TraincastError(f"`dtype={scenario.dtype}` is for described Transformers; give fp32, tf32, bf16 or fp16")
    check_ranks(gpus)
    batch = config.batch_size if scenario.batch_size is None else scenario.batch_size
    workload, assumed = build_hybrid_dlrm(
        config,
        gpus,
        batch_size=batch,
        memory_bytes=platform.device.memory_bytes,
        gpus_per_node=platform.gpus_per_node,
        half=AUTOCAST[scenario.dtype],
        pipelined=pipelined,
        plan=plan,
    )
    return (remove_phase(workload, Phase.OPTIMIZER) if scenario.optimizer == "none" else workload), assumed

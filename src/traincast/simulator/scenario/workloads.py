"""Workloads and published programs become steps of one GPU at the size that is asked for, and are spread over GPUs.

Writers of programs are imported when a step needs them: most predictions read one file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.ir.editor import remove_phase
from traincast.ir.file import load_workload
from traincast.ir.ops import Phase
from traincast.ir.workload import Workload
from traincast.models.catalog import load_model
from traincast.simulator.scenario.kinds import find_source_kind
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.hardware.platform import Platform
    from traincast.models.catalog import PublishedProgram
    from traincast.models.dlrm.config import DlrmConfig
    from traincast.models.placement.plan import Plan


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
        from traincast.models.catalog import find_published_program

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
    from traincast.models.sharded_dlrm.step import (
        build_hybrid_dlrm,  # steps of one GPU need neither
        check_ranks,
    )

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


def get_default_dtype(kind: str) -> str:
    """The arithmetic of a step that names none: bf16 of Transformers by description, else fp32."""
    return "bf16" if kind in ("transformer", "parallel") else "fp32"


def load_single_gpu_step(scenario: Scenario, kind: str | None = None) -> Workload:
    """The step of one GPU (or of those it was captured on) that a scenario asks for; `kind` is that of its workload
    where it is known."""
    kind = kind or find_source_kind(scenario.workload)
    if scenario.dtype is None:
        scenario = scenario.replace(dtype=get_default_dtype(kind))
    if kind == "program":
        from traincast.models.catalog import find_published_program

        return build_published_step(find_published_program(str(scenario.workload)), 1, scenario)[0]
    if kind == "transformer":
        from traincast.simulator.scenario.layouts import build_described_step

        return build_described_step(scenario.workload, scenario)
    if kind == "tables":
        raise TraincastError(f"{scenario.workload} is a set of embedding tables, not a step; name a model")
    source = scenario.workload
    if kind == "recommender":
        return _build_described_recommender(Path(str(source)), scenario)
    if isinstance(source, Workload):
        return _resize_and_compile(_load_captured(source, f"workload '{source.name}'", scenario), scenario)
    return _resize_and_compile(_load_named(str(source), kind, scenario), scenario)


def spread_on_gpus(workload: Workload, gpus: int | None, platform: Platform) -> tuple[Workload, str]:
    """A workload that was loaded on `gpus` GPUs (None: its own), and what was assumed: one that trains FBGEMM tables
    shards them, every other one is data parallel."""
    if gpus is None:
        return workload, ""
    if gpus > 1:
        from traincast.models.sharded_dlrm.recommender import is_shardable

        if is_shardable(workload):
            return shard_workload(workload, gpus, platform, None)
    from traincast.models.data_parallel import replicate_on_gpus

    return replicate_on_gpus(workload, gpus), ""


def compile_workload(workload: Workload) -> Workload:
    """A workload of eager ops as `torch.compile` of its model would run it."""
    from traincast.costs.kernels.registry import make_lowering_context
    from traincast.transforms.fusion import compile_step

    return compile_step(workload, make_lowering_context(workload))


def _resize_and_compile(workload: Workload, scenario: Scenario) -> Workload:
    resized = workload.resized(batch_size=scenario.samples_per_pass, seq_len=scenario.seq_len)
    if scenario.is_compiled:
        return compile_workload(resized)
    from traincast.costs.kernels.registry import make_lowering_context
    from traincast.transforms.fusion import compile_regions

    return compile_regions(resized, make_lowering_context(resized))


def _build_described_recommender(path: Path, scenario: Scenario) -> Workload:
    """A described recommender at the batch size asked for, under autocast where a 16-bit type is."""
    from traincast.models.recommenders.description import load_recommender_description
    from traincast.models.recommenders.families import build_recommender_workload
    from traincast.transforms.retyping.edit import with_autocast

    if scenario.mode == "inference" or scenario.dtype in ("fp8", "fp4"):
        raise TraincastError(f"{path.name} is written as a step of training in fp32, tf32, fp16 or bf16")
    what = load_recommender_description(path)
    if scenario.optimizer not in (None, "none"):
        what = replace(what, optimizer=str(scenario.optimizer))
    step = build_recommender_workload(what, batch_size=scenario.samples_per_pass)
    if scenario.dtype in ("fp16", "bf16"):
        step, _ = with_autocast(step, "float16" if scenario.dtype == "fp16" else "bfloat16")
    step = remove_phase(step, Phase.OPTIMIZER) if scenario.optimizer == "none" else step
    return compile_workload(step) if scenario.is_compiled else step


def _load_captured(workload: Workload, name: str, scenario: Scenario) -> Workload:
    """A workload that was captured before, called `name` in messages, with what can still be chosen of it."""
    check_captured_choices(name, workload.mode, scenario)
    return remove_phase(workload, Phase.OPTIMIZER) if scenario.optimizer == "none" else workload


def check_captured_choices(name: str, mode: str, scenario: Scenario) -> None:
    """Rejects what cannot be chosen any more of a workload that was captured: its mode, optimizer, ops and types."""
    if scenario.mode not in (None, mode):
        raise TraincastError(
            f"{name} holds a step of {mode}, not {scenario.mode}; capture it again for `mode={scenario.mode}`"
        )
    if scenario.optimizer not in (None, "none"):
        raise TraincastError(f"{name} holds its own optimizer; only `optimizer='none'` can change it")
    if scenario.dtype in ("fp16", "bf16", "fp8", "fp4"):
        raise TraincastError(
            f"{name} keeps the types it was captured with; capture it under autocast for {scenario.dtype}, or ask "
            f"`whatif` with `dtype={scenario.dtype}`"
        )
    for option in ("attention", "embedding"):
        choice = getattr(scenario, option)
        if choice is not None:
            raise TraincastError(
                f"{name} keeps the ops it was captured with; leave out `{option}`, or capture the model with {choice}"
            )


def _load_named(name: str, kind: str, scenario: Scenario) -> Workload:
    if kind == "workload":
        return _load_captured(load_workload(Path(name)), Path(name).name, scenario)
    mode = scenario.mode or "training"
    precision = str(scenario.dtype)
    if precision in ("fp8", "fp4"):
        raise TraincastError(
            f"`dtype={precision}` needs modules that scale their operands, which {name} does not have; it is for "
            "described Transformers: give bf16"
        )
    if name.endswith((".yaml", ".yml")):
        from traincast.simulator.scenario.dlrm_file import load_dlrm_yaml

        return load_dlrm_yaml(
            Path(name), mode=mode, optimizer=scenario.optimizer, precision=precision, embedding=scenario.embedding
        )
    return load_model(
        name, mode=mode, optimizer=scenario.optimizer, precision=precision, attention=scenario.attention,
        embedding=scenario.embedding,
    )  # fmt: skip

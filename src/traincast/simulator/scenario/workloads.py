"""Names and files of workloads become workloads, at the size and in the variant asked for.

Writers of programs are imported when a step needs them: most predictions read one file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from traincast.ir.edit import without_phase
from traincast.ir.file import load_workload
from traincast.ir.ops import Phase
from traincast.ir.workload import Workload
from traincast.models.catalog import list_models, load_model
from traincast.simulator.scenario.variant import Variant, check_held
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.hardware.platform import Platform
    from traincast.models.published import PublishedProgram

_FILES = (".tc", ".yaml", ".yml")

Source = str | Path | Workload
"""A built-in model or a published program by name, a saved workload (`.tc`), a DLRM or a Transformer described in a
file, or a workload itself."""


def load(source: Source, variant: Variant) -> Workload:
    """The workload of one GPU (or of those it was captured on) in a variant."""
    program = published_program(source)
    if program is not None:
        from traincast.simulator.scenario.published import published_step

        return published_step(program, 1, variant)[0]
    if is_transformer(source):
        from traincast.simulator.scenario.transformers import described_step

        return described_step(str(source), variant)
    if isinstance(source, Workload):
        return _at_size(_held(source, f"workload '{source.name}'", variant), variant)
    return _at_size(_named(str(source), variant), variant)


def is_transformer(source: Source) -> bool:
    """Whether a step of this source is written from the description of a Transformer."""
    if isinstance(source, Workload) or str(source) in {info.name for info in list_models()}:
        return False
    from traincast.models.transformers.reading import is_described

    return is_described(str(source))


def default_dtype(source: Source) -> str:
    """The arithmetic of a step that names none: fp32, and bf16 of Transformers by description."""
    return "bf16" if is_transformer(source) else "fp32"


def published_program(source: Source) -> PublishedProgram | None:
    """The published program of this name; None for a built-in model, a file, a workload, or a name of nothing."""
    if isinstance(source, Workload):
        return None
    name = str(source)
    if Path(name).suffix in _FILES or name in {info.name for info in list_models()} or is_transformer(source):
        return None
    from traincast.models.published import published_programs

    return published_programs().get(name)


def load_on(
    source: Source, platform: Platform, variant: Variant, *, gpus: int | None = None, always_sharded: bool = False,
    program: str | None = None,
) -> tuple[Workload, str]:  # fmt: skip
    """A workload as it runs on `gpus` GPUs of a platform, and what was assumed about that ("" for nothing).

    On several GPUs a DLRM and every other step that trains FBGEMM tables shards them (with `always_sharded` or a
    `program` also on one), every other workload of one GPU is data parallel; one captured on several GPUs runs on
    those, a published program as its authors divide it.
    """
    if program is not None:
        return _under(program, source, platform, variant, 1 if gpus is None else gpus)
    published = published_program(source)
    if published is not None:
        from traincast.simulator.scenario.published import published_step

        return published_step(published, 1 if gpus is None else gpus, variant, platform.gpus_per_node)
    if not isinstance(source, Workload) and gpus is not None and (gpus > 1 or always_sharded):
        from traincast.simulator.scenario.programs import recommender_on
        from traincast.simulator.scenario.recommenders import described_dlrm

        config = described_dlrm(str(source)) if variant.mode != "inference" else None
        if config is not None:
            return recommender_on(config, gpus, platform, variant, None)
    if gpus is not None and gpus > 1 and is_transformer(source):
        raise TraincastError(
            f"'{source}' is laid over {gpus} GPUs by a layout; call predict_training(..., layout=Layout(gpus={gpus}))"
        )
    return spread(load(source, variant), gpus, platform, always_sharded=always_sharded)


def spread(
    workload: Workload, gpus: int | None, platform: Platform, *, always_sharded: bool = False
) -> tuple[Workload, str]:
    """A workload that was loaded on `gpus` GPUs (None: its own), and what was assumed: one that trains FBGEMM tables
    shards them, every other one is data parallel."""
    if gpus is None:
        return workload, ""
    if gpus > 1 or always_sharded:
        from traincast.models.sharded_dlrm.recommender import is_shardable
        from traincast.simulator.scenario.programs import sharded_on

        if is_shardable(workload):
            return sharded_on(workload, gpus, platform, None)
    from traincast.models.data_parallel import on_gpus

    return on_gpus(workload, gpus), ""


def as_compiled(workload: Workload) -> Workload:
    """A workload of eager ops as `torch.compile` of its model would run it."""
    from traincast.costs.kernels.registry import lowering_context
    from traincast.transforms.fusion import compiled_step

    return compiled_step(workload, lowering_context(workload))


def _under(program: str, source: Source, platform: Platform, variant: Variant, gpus: int) -> tuple[Workload, str]:
    """A recommender under a program that was asked for."""
    from traincast.models.sharded_dlrm.recommender import is_shardable
    from traincast.simulator.scenario.programs import check_eager, check_program, no_program, recommender_on, sharded_on
    from traincast.simulator.scenario.recommenders import described_dlrm

    check_program(program)
    named = f"workload '{source.name}'" if isinstance(source, Workload) else str(source)
    nobody = no_program(named)
    if published_program(source) is not None or is_transformer(source) or variant.mode == "inference":
        raise nobody
    check_eager(named, gpus, variant)
    config = None if isinstance(source, Workload) else described_dlrm(str(source))
    if config is not None:
        return recommender_on(config, gpus, platform, variant, program)
    workload = load(source, variant)
    if not is_shardable(workload):
        raise nobody
    return sharded_on(workload, gpus, platform, program)


def _at_size(workload: Workload, variant: Variant) -> Workload:
    resized = workload.resized(batch_size=variant.batch_size, seq_len=variant.seq_len)
    if variant.compiled:
        return as_compiled(resized)
    from traincast.costs.kernels.registry import lowering_context
    from traincast.transforms.fusion import compiled_regions

    return compiled_regions(resized, lowering_context(resized))


def _held(workload: Workload, name: str, variant: Variant) -> Workload:
    """A workload that was captured before, called `name` in messages, with what can still be chosen of it."""
    check_held(name, workload.mode, variant)
    return without_phase(workload, Phase.OPTIMIZER) if variant.optimizer == "none" else workload


def _named(name: str, variant: Variant) -> Workload:
    if name.endswith(".tc"):
        return _held(load_workload(Path(name)), Path(name).name, variant)
    mode = variant.mode or "training"
    if name.endswith((".yaml", ".yml")):
        from traincast.simulator.scenario.dlrm_file import load_dlrm_yaml

        if variant.attention is not None:
            raise TraincastError(f"{name} has no attention; leave out `attention`")
        return load_dlrm_yaml(
            Path(name),
            mode=mode,
            optimizer=variant.optimizer,
            precision=variant.dtype,
            embedding=variant.embedding,
        )
    return load_model(
        name,
        mode=mode,
        optimizer=variant.optimizer,
        precision=variant.dtype,
        attention=variant.attention,
        embedding=variant.embedding,
    )

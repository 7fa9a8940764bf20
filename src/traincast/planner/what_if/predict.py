"""The step of a scene, predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from traincast.hardware.links import with_links
from traincast.hardware.platform import Platform
from traincast.ir.edit import without_phase
from traincast.ir.given import joined
from traincast.ir.ops import Phase
from traincast.ir.workload import Workload
from traincast.planner.what_if.scene import Scene, Structural, training_question
from traincast.simulator.prediction.prediction import predict_step
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.predict import missing_units, step_notes
from traincast.simulator.scenario.programs import PIPELINED, TORCHREC, check_eager, recommender_on
from traincast.simulator.scenario.variant import Variant
from traincast.simulator.scenario.workloads import Source, as_compiled, load, load_on, spread
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.models.dlrm.config import DlrmConfig
    from traincast.simulator.parallelism.result import TrainingPrediction

Answer: TypeAlias = "Prediction | TrainingPrediction"
"""What is known of a step: one walked op by op, or one put together from the roles of ranks."""


def predicted(scene: Scene) -> Answer:
    """The answer for a scene; what was assumed and edited is among its warnings."""
    if scene.layout is not None:
        return _laid_out(scene)
    step, notes = step_of(scene)
    return walked(scene, step, notes)


def walked(scene: Scene, step: Workload, notes: list[str]) -> Prediction:
    """The prediction of a step that was loaded, with notes among its warnings."""
    question, alone = scene.question, scene.platform
    many = len(step.ranks) > 1
    platform = with_links(alone) if many else alone
    loader = question.loader
    answer = predict_step(
        step,
        platform,
        tf32=question.variant.dtype == "tf32",
        host=question.host_profile(),
        roofline_only=question.roofline_only,
        uneven=question.uneven,
        late=0.0 if loader is None else loader.late(step),
        op_speed=scene.op_speed,
    )
    if loader is not None:
        answer = loader.limited(answer)
    said = (missing_units(question.variant.dtype, alone), *notes, platform.assumed if many else "")
    warnings = (*answer.warnings, *(note for note in said if note))
    return replace(answer, warnings=warnings) if len(warnings) > len(answer.warnings) else answer


def step_of(scene: Scene) -> tuple[Workload, list[str]]:
    """The workload of a scene with all its edits, and what is to be said about it."""
    question = scene.question
    step, notes = _loaded(scene)
    if question.costs:
        step = replace(step, costs=joined(step.costs, question.costs))
    step, more = _edited(step, scene.across)
    notes += more
    if question.loader is not None:
        step = question.loader.feeding(step)
    if question.cuda_graph:
        from traincast.transforms.cuda_graph import graphed_step  # rooms are read by the steps that need them

        step, said = graphed_step(step)
        notes.append(said)
    return step, [*notes, *step_notes(step)]


def _loaded(scene: Scene) -> tuple[Workload, list[str]]:
    """The step on its GPUs with its structural edits."""
    question, platform = scene.question, with_links(scene.platform)
    if _is_sharded(scene) and (scene.dlrm is not None or scene.plan is not None):
        step, said = _recommender(scene, platform)
    elif _is_sharded(scene):
        step, said = load_on(
            question.workload, platform, question.variant, gpus=question.gpus, program=question.program
        )  # fmt: skip
    else:
        whole, assumed = _one_gpu(scene, platform)
        step, notes = _edited(whole, scene.structural)
        if question.variant.compiled and scene.source != "transformer":
            step = as_compiled(step)
        step, said = _on_gpus(scene, step, platform)
        return step, [assumed, said, *notes]
    step, notes = _edited(step, scene.structural)
    _check_buckets(scene, step)
    return step, [said, *notes]


def _is_sharded(scene: Scene) -> bool:
    """Whether the step on several GPUs is another program than that of one GPU under data parallelism."""
    many = scene.gpus > 1 and scene.source == "dlrm" and scene.question.variant.mode != "inference"
    return many or scene.source == "published" or scene.question.program is not None


def _one_gpu(scene: Scene, platform: Platform) -> tuple[Workload, str]:
    """The step of one GPU before edits of its ops, and what was assumed; of eager ops, but for Transformers, which are
    written compiled."""
    question, variant = scene.question, scene.question.variant
    if scene.transformer is not None:
        from traincast.simulator.scenario.transformers import described_step

        return described_step(scene.transformer, variant), ""
    if scene.source == "transformer":  # sizes decide what is written
        return load(question.workload, variant), ""
    eager = replace(variant, compiled=False)
    if scene.dlrm is not None:
        return _written(scene.dlrm, eager, platform)
    return _resized(question.workload, scene.content, replace(eager, batch_size=None, seq_len=None), eager), ""


@lru_cache(maxsize=16)
def _at_own_size(source: Source, content: str, variant: Variant) -> Workload:
    """A workload as it was saved: what-ifs of many sizes read its file once, as long as it has this content."""
    return load(source, variant)


@lru_cache(maxsize=16)
def _resized(source: Source, content: str, variant: Variant, sizes: Variant) -> Workload:
    """One object for one size, so that what was lowered for one platform serves others. What a compiler fuses depends
    on sizes: a step with compiled regions is loaded at each."""
    own = _at_own_size(source, content, variant)
    if "compiled" in own.meta:
        return load(source, sizes)
    return own.resized(batch_size=sizes.batch_size, seq_len=sizes.seq_len)


def _on_gpus(scene: Scene, step: Workload, platform: Platform) -> tuple[Workload, str]:
    if scene.source == "transformer" and scene.gpus > 1:
        raise TraincastError(
            f"{scene.name} is laid over several GPUs by a layout, which the step before must have too: give its "
            "number of GPUs, or `tp` or `fsdp`, as predict takes them"
        )
    if scene.bucket_mb is None:
        return spread(step, scene.question.gpus, platform)
    from traincast.models.data_parallel import data_parallel
    from traincast.models.sharded_dlrm.recommender import is_shardable

    _check_buckets(scene, step)
    if is_shardable(step):
        raise TraincastError(f"{scene.name} shards its tables over GPUs; its buckets are those of its program")
    return data_parallel(step, scene.gpus, bucket_mb=scene.bucket_mb), ""


def _check_buckets(scene: Scene, step: Workload) -> None:
    if scene.bucket_mb is None:
        return
    if len(step.ranks) > 1:
        raise TraincastError(
            f"{scene.name} keeps the buckets it was made with; buckets are chosen where a step of one GPU becomes data "
            "parallel"
        )
    if scene.gpus == 1:
        raise TraincastError("one GPU exchanges no gradients: buckets need `gpus` of 2 or more")


def _recommender(scene: Scene, platform: Platform) -> tuple[Workload, str]:
    """A described recommender with its tables sharded: by its program, or under a plan of the user's."""
    question, config = scene.question, scene.of_dlrm()
    variant = replace(question.variant, embedding=None)
    if scene.plan is None:
        return recommender_on(config, scene.gpus, platform, variant, question.program)
    check_eager(config.name, scene.gpus, variant)
    if question.program not in (None, TORCHREC, PIPELINED):
        raise TraincastError(f"a plan is for TorchRec's program, not '{question.program}'; leave out one of them")
    from traincast.simulator.scenario.recommenders import hybrid_variant

    pipelined = question.program == PIPELINED
    return hybrid_variant(config, scene.gpus, platform, variant, pipelined=pipelined, plan=scene.plan)


def _written(config: DlrmConfig, variant: Variant, platform: Platform) -> tuple[Workload, str]:
    """A described recommender on one GPU."""
    from traincast.models.dlrm.cross_config import DcnConfig
    from traincast.models.dlrm.program import dlrm_workload
    from traincast.simulator.scenario.recommenders import AUTOCAST, hybrid_variant
    from traincast.transforms.retyping.edit import with_autocast, with_weights

    mode = variant.mode or "training"
    if isinstance(config, DcnConfig):
        if mode == "inference":
            raise TraincastError(f"{config.name} is written as a step of training; leave out the edit or `mode`")
        return hybrid_variant(config, 1, platform, replace(variant, embedding=None))
    if config.embedding == "bag":
        raise TraincastError(
            f"{config.name} with one embedding bag per table is a capture; set embedding=batched to change its sizes"
        )
    step = dlrm_workload(config, mode=mode).resized(batch_size=variant.batch_size)
    if half := AUTOCAST[variant.dtype]:
        step, _ = (with_weights if mode == "inference" else with_autocast)(step, half)
    return (without_phase(step, Phase.OPTIMIZER) if variant.optimizer == "none" else step), ""


def _edited(step: Workload, edits: tuple[tuple[str, Structural], ...]) -> tuple[Workload, list[str]]:
    notes = []
    for name, function in edits:
        try:
            step, said = function(step)
        except TraincastError as error:
            raise TraincastError(f"edit {name}: {error}") from None
        notes.append(said)
    return step, notes


def _laid_out(scene: Scene) -> TrainingPrediction:
    refused = {
        "edits of ops": scene.structural or scene.across,
        "speeds of ops": scene.op_speed,
        "bucket-mb": scene.bucket_mb is not None,
        "plan": scene.plan is not None,
        "a data loader": scene.question.loader is not None,
        "costs of ops": scene.question.costs,
    }
    for what, given in refused.items():
        if given:
            raise TraincastError(
                f"{what} cannot be applied to {scene.name}: its step on {scene.gpus} GPUs is put together from roles "
                "of ranks, not from ops; leave it out"
            )
    from traincast.planner.parallelism.ask import answer_training  # only layouts need the room of training

    return answer_training(training_question(scene))

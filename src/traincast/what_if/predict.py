"""The step of a scene, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from traincast.errors import TraincastError
from traincast.platform.links import with_links
from traincast.platform.platform import Platform
from traincast.prediction.prediction import predict_step
from traincast.prediction.result import Prediction
from traincast.prediction.sizes import SizeAnswer, predict_sizes
from traincast.programs.data_parallel import data_parallel, on_gpus
from traincast.programs.dlrm.cross_config import DcnConfig
from traincast.programs.dlrm.program import dlrm_workload
from traincast.programs.sharded.hybrid import hybrid_dlrm
from traincast.questions.cuda_graph import graphed_step
from traincast.questions.predict import missing_units
from traincast.questions.programs import TORCHREC, recommender_on
from traincast.questions.recommenders import hybrid_variant
from traincast.questions.transformers import described_step
from traincast.questions.variant import Variant
from traincast.questions.workloads import Source, load, load_on
from traincast.what_if.scene import Scene, Structural, training_question
from traincast.workload.edit import without_phase
from traincast.workload.ops import Phase
from traincast.workload.workload import Workload

if TYPE_CHECKING:
    from traincast.training.result import TrainingPrediction

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
        late=0.0 if loader is None else loader.before_step,
        op_speed=scene.op_speed,
    )
    if loader is not None:
        answer = loader.limited(answer)
    said = (missing_units(question.variant.dtype, alone), *notes, platform.assumed if many else "")
    warnings = (*answer.warnings, *(note for note in said if note))
    return replace(answer, warnings=warnings) if len(warnings) > len(answer.warnings) else answer


def predicted_sizes(scenes: Sequence[Scene]) -> list[tuple[SizeAnswer, int]]:
    """What `predicted` says of scenes that differ in batch size or sequence length only, all of one GPU and without a
    data loader, and the samples of each step."""
    steps = [step_of(scene)[0] for scene in scenes]
    first = scenes[0]
    assert first.question.loader is None
    answers = predict_sizes(
        steps,
        first.platform,
        tf32=first.question.variant.dtype == "tf32",
        host=first.question.host_profile(),
        roofline_only=first.question.roofline_only,
        op_speed=first.op_speed,
    )
    return [(answer, step.samples) for answer, step in zip(answers, steps, strict=True)]


def step_of(scene: Scene) -> tuple[Workload, list[str]]:
    """The workload of a scene with all its edits, and what is to be said about it."""
    question = scene.question
    step, notes = _loaded(scene)
    step, more = _edited(step, scene.across)
    notes += more
    if question.loader is not None:
        step = question.loader.feeding(step)
    if question.cuda_graph:
        step, said = graphed_step(step)
        notes.append(said)
    if "compiled" in step.meta:
        notes.append(step.meta["compiled"])
    return step, notes


def _loaded(scene: Scene) -> tuple[Workload, list[str]]:
    """The step on its GPUs with its structural edits."""
    question, platform = scene.question, with_links(scene.platform)
    gpus = question.gpus
    if scene.dlrm is not None or scene.plan is not None:
        step, said = _recommender(scene, platform)
    elif _is_sharded(scene):
        step, said = load_on(
            question.workload, platform, question.variant, gpus=gpus, program=question.program
        )  # fmt: skip
    else:
        whole, said = _one_gpu(scene)
        step, notes = _edited(whole, scene.structural)
        return _on_gpus(scene, step), [said, *notes]
    step, notes = _edited(step, scene.structural)
    _check_buckets(scene, step)
    return step, [said, *notes]


def _is_sharded(scene: Scene) -> bool:
    """Whether the step on several GPUs is another program than that of one GPU under data parallelism."""
    many = scene.gpus > 1 and scene.source == "dlrm" and scene.question.variant.trains_eagerly
    return many or scene.source == "published" or scene.question.program is not None


def _one_gpu(scene: Scene) -> tuple[Workload, str]:
    question = scene.question
    if scene.transformer is not None:
        return described_step(scene.transformer, question.variant), ""
    variant = question.variant
    if variant.compiled or scene.source == "transformer":  # sizes decide what is written
        return load(question.workload, variant), ""
    return _resized(question.workload, replace(variant, batch_size=None, seq_len=None), variant), ""


@lru_cache(maxsize=16)
def _at_own_size(source: Source, variant: Variant) -> Workload:
    """A workload as it was saved: what-ifs of many sizes read its file once."""
    return load(source, variant)


@lru_cache(maxsize=16)
def _resized(source: Source, variant: Variant, sizes: Variant) -> Workload:
    """One object for one size, so that what was lowered for one platform serves others."""
    return _at_own_size(source, variant).resized(batch_size=sizes.batch_size, seq_len=sizes.seq_len)


def _on_gpus(scene: Scene, step: Workload) -> Workload:
    gpus = scene.question.gpus
    if scene.bucket_mb is None:
        return on_gpus(step, gpus)
    _check_buckets(scene, step)
    return data_parallel(step, gpus or 1, bucket_mb=scene.bucket_mb)


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
    """A described recommender: on one GPU as it is written, on several with its tables sharded."""
    question, config = scene.question, scene.of_dlrm()
    variant = question.variant
    if scene.plan is not None:
        return _planned(scene, platform)
    if scene.gpus > 1:
        return recommender_on(config, scene.gpus, platform, replace(variant, embedding=None), question.program)
    if isinstance(config, DcnConfig):
        return hybrid_variant(config, 1, platform, replace(variant, embedding=None))
    if variant.dtype in ("fp16", "bf16"):
        raise TraincastError(f"a DLRM that is written runs in fp32 or tf32, not {variant.dtype}; leave out one edit")
    if config.embedding == "bag":
        raise TraincastError(
            f"{config.name} with one embedding bag per table is a capture; set embedding=batched to change its sizes"
        )
    step = dlrm_workload(config, mode=variant.mode or "training").resized(batch_size=variant.batch_size)
    return (without_phase(step, Phase.OPTIMIZER) if variant.optimizer == "none" else step), ""


def _planned(scene: Scene, platform: Platform) -> tuple[Workload, str]:
    """A recommender under a plan of the user's."""
    variant, config, plan = scene.question.variant, scene.of_dlrm(), scene.plan
    assert plan is not None
    if scene.question.program not in (None, TORCHREC):
        raise TraincastError(f"a plan is for TorchRec's program, not '{scene.question.program}'; leave out one of them")
    return hybrid_dlrm(
        config,
        scene.gpus,
        batch_size=config.batch_size if variant.batch_size is None else variant.batch_size,
        memory_bytes=platform.device.memory_bytes,
        gpus_per_node=platform.gpus_per_node,
        half={"bf16": "bfloat16", "fp16": "float16"}.get(variant.dtype, ""),
        plan=plan,
    )


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
    }
    for what, given in refused.items():
        if given:
            raise TraincastError(
                f"{what} cannot be applied to {scene.name}: its step on {scene.gpus} GPUs is put together from roles "
                "of ranks, not from ops; leave it out"
            )
    from traincast.questions.training import answer_training  # only layouts need the room of training

    return answer_training(training_question(scene))

"""Arithmetic, optimizer and attention."""

from __future__ import annotations

from collections.abc import Callable

from traincast.ir.workload import Workload
from traincast.planner.what_if.edits.registry import Value, edit
from traincast.planner.what_if.scene import Scene
from traincast.simulator.scenario.predict import missing_units
from traincast.simulator.scenario.variant import ATTENTIONS, DTYPES, OPTIMIZERS
from traincast.utils.errors import TraincastError

_HALF = {"amp": "float16", "fp16": "float16", "bf16": "bfloat16"}
_WEIGHTS = {"fp16-weights": "float16", "bf16-weights": "bfloat16"}
_ALL = (*DTYPES, "amp", *_WEIGHTS, "fp8")
_RISKS = {
    "fp32": "", "tf32": "accuracy: products of 10 bits", "bf16": "accuracy: numbers of 7 bits",
    **dict.fromkeys(("fp16", "amp"), "accuracy: numbers of 10 bits, the loss must be scaled"),
    **dict.fromkeys(_WEIGHTS, "accuracy: weights and optimizer in 16 bits"),
    "fp8": "accuracy: products of 2 or 3 bits, operands must be scaled",
}  # fmt: skip
"""Of each type, by the bits of its fraction."""


@edit("dtype", "arithmetic: TF32, autocast to 16 bits (amp: fp16, PyTorch's default), weights in 16 bits, fp8 in a "
      "layout", takes="|".join(_ALL), risk="accuracy: fewer bits; fp16 needs loss scaling", risks=_RISKS,
      advised=("tf32", "bf16"))  # fmt: skip
def dtype(scene: Scene, value: Value) -> Scene:
    """Another arithmetic."""
    choice = value.choice(_ALL)
    if scene.layout is not None:
        if choice in _WEIGHTS or choice == "amp":
            raise TraincastError(f"layouts have {', '.join((*DTYPES, 'fp8'))}, not {choice}")
        return scene.laid_out(precision=choice)
    if choice == "fp8":
        raise TraincastError(
            "fp8 needs modules that scale their operands, which a step of ops does not have; it is predicted for "
            "Transformers laid over GPUs by a layout: give bf16 here"
        )
    from traincast.transforms.retyping.edit import with_autocast, with_weights  # only this edit needs them

    if choice in _WEIGHTS:
        if scene.question.variant.mode == "inference" and scene.source != "capture":
            return scene.varied(dtype=choice.removesuffix("-weights"))
        return _of_ops(scene, choice, with_weights, _WEIGHTS[choice])
    if choice in _HALF and _is_written(scene):
        infers = scene.question.variant.mode == "inference"
        return _of_ops(scene, choice, with_weights if infers else with_autocast, _HALF[choice])
    if choice in _HALF and scene.source == "capture":
        return _of_ops(scene, choice, with_autocast, _HALF[choice])
    return scene.varied(dtype="fp16" if choice == "amp" else choice)


def _is_written(scene: Scene) -> bool:
    """Whether the step is that of a DLRM on one GPU that is written in float32 from its file."""
    alone = scene.source == "dlrm" and scene.gpus == 1 and scene.question.program is None
    return alone and scene.dlrm is None and str(scene.question.workload).endswith((".yaml", ".yml"))


def _of_ops(scene: Scene, choice: str, retyped: Callable[[Workload, str], tuple[Workload, str]], low: str) -> Scene:
    """The scene with casts among its ops."""
    missing = missing_units({"float16": "fp16", "bfloat16": "bf16"}[low], scene.platform)

    def edited(step: Workload) -> tuple[Workload, str]:
        changed, said = retyped(step, low)
        return changed, f"{said}; {missing}" if missing else said

    return scene.edited(f"dtype={choice}", edited)


@edit("optimizer", "another optimizer, or none", takes="|".join(OPTIMIZERS), risk="accuracy: another training")
def optimizer(scene: Scene, value: Value) -> Scene:
    """Another optimizer."""
    choice = value.choice(OPTIMIZERS)
    if scene.layout is not None:
        if choice not in ("adam", "none"):
            raise TraincastError(f"layouts have adam or none, not {choice}")
        return scene.laid_out(optimizer=choice)
    if scene.source == "capture" and choice != "none":
        from traincast.transforms.optimizing import with_optimizer  # only this edit needs it

        return scene.edited(f"optimizer={choice}", lambda step: with_optimizer(step, choice))
    return scene.varied(optimizer=choice)


@edit("attention", "attention op by op, or as one fused kernel", takes="|".join(ATTENTIONS), advised=("sdpa",))
def attention(scene: Scene, value: Value) -> Scene:
    """Another attention."""
    choice = value.choice(ATTENTIONS)
    if scene.layout is not None:
        return scene.laid_out(attention="flash" if choice == "sdpa" else "unfused")
    return scene.varied(attention=choice)

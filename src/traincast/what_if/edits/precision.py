"""Arithmetic, optimizer and attention."""

from __future__ import annotations

from traincast.errors import TraincastError
from traincast.questions.variant import ATTENTIONS, DTYPES, OPTIMIZERS
from traincast.what_if.edits.registry import Value, edit
from traincast.what_if.ops.optimizing import with_optimizer
from traincast.what_if.scene import Scene

_ALL = (*DTYPES, "fp8")


@edit("dtype", "arithmetic: TF32, autocast to 16 bits, fp8 in a layout", takes="|".join(_ALL),
      risk="accuracy: fewer bits; fp16 needs loss scaling", advised=("tf32", "bf16"))  # fmt: skip
def dtype(scene: Scene, value: Value) -> Scene:
    """Another arithmetic."""
    choice = value.choice(_ALL)
    if scene.layout is not None:
        return scene.laid_out(precision=choice)
    if choice == "fp8":
        raise TraincastError("fp8 is predicted for Transformers laid over GPUs by a layout; give bf16 here")
    return scene.varied(dtype=choice)


@edit("optimizer", "another optimizer, or none", takes="|".join(OPTIMIZERS), risk="accuracy: another training")
def optimizer(scene: Scene, value: Value) -> Scene:
    """Another optimizer."""
    choice = value.choice(OPTIMIZERS)
    if scene.layout is not None:
        if choice not in ("adam", "none"):
            raise TraincastError(f"layouts have adam or none, not {choice}")
        return scene.laid_out(optimizer=choice)
    if scene.source == "capture" and choice != "none":
        return scene.edited(f"optimizer={choice}", lambda step: with_optimizer(step, choice))
    return scene.varied(optimizer=choice)


@edit("attention", "attention op by op, or as one fused kernel", takes="|".join(ATTENTIONS), advised=("sdpa",))
def attention(scene: Scene, value: Value) -> Scene:
    """Another attention."""
    choice = value.choice(ATTENTIONS)
    if scene.layout is not None:
        return scene.laid_out(attention="flash" if choice == "sdpa" else "unfused")
    return scene.varied(attention=choice)

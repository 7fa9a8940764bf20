"""Transformers by their description, and how they are laid over GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from traincast.planner.what_if.edits.registry import Value, edit
from traincast.planner.what_if.scene import Scene
from traincast.simulator.parallelism.layout import CHECKPOINTS, LAUNCHES, SHARDINGS
from traincast.utils.errors import TraincastError

_MOST_LAYERS, _MOST_WIDTH = 10_000, 1 << 20


def _described(scene: Scene, **changes: Any) -> Scene:
    return replace(scene, transformer=replace(scene.of_transformer(), **changes))


def _laid(scene: Scene, **changes: Any) -> Scene:
    if scene.layout is None:
        raise TraincastError(
            f"{scene.name} is not laid over GPUs by a layout; predict it with one, such as `tp` or `fsdp`"
        )
    return scene.laid_out(**changes)


@edit("layers", "number of layers of a described Transformer", takes="N", risk="accuracy: another model")
def layers(scene: Scene, value: Value) -> Scene:
    """More or fewer layers."""
    return _described(scene, layers=value.whole(most=_MOST_LAYERS))


@edit("ffn", "width of the feed-forward layers of a described Transformer", takes="N", risk="accuracy: another model")
def ffn(scene: Scene, value: Value) -> Scene:
    """Other feed-forward layers."""
    return _described(scene, ffn=value.whole(most=_MOST_WIDTH))


@edit("vocab", "words that a described Transformer knows", takes="N", risk="accuracy: another tokenizer")
def vocab(scene: Scene, value: Value) -> Scene:
    """Another vocabulary."""
    return _described(scene, vocab=value.whole(most=1 << 24))


@edit("tp", "tensor-parallel ranks", takes="N")
def tensor_parallel(scene: Scene, value: Value) -> Scene:
    """Another tensor parallelism; the rest of the GPUs is data parallel."""
    return _laid(scene, tp=value.whole(most=1 << 16))


@edit("pp", "pipeline stages", takes="N")
def pipeline_parallel(scene: Scene, value: Value) -> Scene:
    """Another number of stages."""
    return _laid(scene, pp=value.whole(most=1 << 16))


@edit("cp", "ranks that share the tokens of a sample", takes="N")
def context_parallel(scene: Scene, value: Value) -> Scene:
    """Another context parallelism."""
    return _laid(scene, cp=value.whole(most=1 << 16))


@edit("sharding", "what data-parallel ranks share", takes="|".join(SHARDINGS))
def sharding(scene: Scene, value: Value) -> Scene:
    """Another sharding of optimizer, gradients, parameters."""
    return _laid(scene, sharding=value.choice(SHARDINGS))


@edit("kernels", "who launches kernels", takes="|".join(LAUNCHES), excludes=("cuda-graph", "compile"))
def kernels(scene: Scene, value: Value) -> Scene:
    """Another way to launch."""
    choice = value.choice(LAUNCHES)
    return _laid(scene, kernels=choice)


@edit("global-batch", "samples of a step, all GPUs together", takes="N", risk="accuracy: another batch")
def global_batch(scene: Scene, value: Value) -> Scene:
    """Another global batch."""
    return _laid(scene, global_batch=value.whole(most=1 << 30))


@edit("recompute", "what backward computes again in a layout", takes="|".join(CHECKPOINTS))
def recompute(scene: Scene, value: Value) -> Scene:
    """Another selective recomputation."""
    return _laid(scene, checkpoint=value.choice(CHECKPOINTS))

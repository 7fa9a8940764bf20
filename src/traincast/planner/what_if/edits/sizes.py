"""Batch size and sequence length."""

from __future__ import annotations

from traincast.ir.workload import MAX_BATCH, MAX_SEQ_LEN
from traincast.planner.what_if.edits.registry import Value, edit
from traincast.planner.what_if.scene import Scene
from traincast.utils.errors import TraincastError


@edit("batch-size", "samples per GPU (of a micro-batch in a layout)", takes="N", risk="accuracy: another batch",
      advised=("x2", "x4"))  # fmt: skip
def batch_size(scene: Scene, value: Value) -> Scene:
    """Another batch size per GPU; `x2` is twice what it is."""
    if value.text.startswith("x"):
        number = round(batch_of(scene) * value.factor())
        return batch_size(scene, Value(text=str(max(1, number)), edit=value.edit))
    number = value.whole(most=MAX_BATCH)
    if scene.layout is None:
        return scene.varied(batch_size=number)
    layout = scene.layout
    batch = layout.global_batch
    if batch:
        share = number * layout.dp
        batch = max(share, batch // share * share)
    return scene.laid_out(micro_batch=number, global_batch=batch)


@edit("seq-len", "tokens per sample", takes="N", risk="accuracy: other samples")
def seq_len(scene: Scene, value: Value) -> Scene:
    """Another sequence length."""
    number = value.whole(most=MAX_SEQ_LEN)
    return scene.varied(seq_len=number) if scene.layout is None else scene.laid_out(seq_len=number)


def batch_of(scene: Scene) -> int:
    """Samples per GPU of a scene as it is."""
    from traincast.ir.workload import Workload
    from traincast.simulator.scenario.workloads import load

    if scene.layout is not None:
        return scene.layout.micro_batch
    variant, source = scene.question.variant, scene.question.workload
    if variant.batch_size is not None:
        return variant.batch_size
    if scene.dlrm is not None or scene.source == "dlrm":
        return scene.of_dlrm().batch_size
    if scene.source == "published":
        raise TraincastError(f"{scene.name} has a batch for all its GPUs; give a number instead of a factor")
    return source.batch_size if isinstance(source, Workload) else load(source, variant).batch_size

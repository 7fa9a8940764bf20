"""How gradients are exchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.planner.what_if.edits.registry import Value, edit
from traincast.planner.what_if.scene import Scene
from traincast.utils.errors import TraincastError


@edit("bucket-mb", "size of DDP's gradient buckets, MiB", takes="N", advised=("100",))
def bucket_mb(scene: Scene, value: Value) -> Scene:
    """Other buckets of gradients."""
    return replace(scene, bucket_mb=value.factor(least=1e-3, most=1e6))


@edit("checkpoint", "activations of modules computed again in backward: layers, or a pattern of module paths",
      takes="layers|PATTERN", advised=("layers",), excludes=("compile", "fuse-elementwise"),
      risk="the forward pass of the modules runs twice")  # fmt: skip
def checkpoint(scene: Scene, value: Value) -> Scene:
    """Less memory for more work."""
    if scene.layout is not None:
        raise TraincastError("layouts say what is computed again by recompute=full or recompute=selective")
    if scene.source == "transformer":
        raise TraincastError(
            f"{scene.name} is written without modules; lay it out, with `tp` of 1 on one GPU, and give recompute=full"
        )
    if scene.question.variant.compiled:
        raise TraincastError("what a compiled step computes again is the compiler's choice; leave out `compiled`")
    from traincast.transforms.checkpointing import checkpointed  # only this edit needs it

    return scene.edited(f"checkpoint={value.text}", lambda step: checkpointed(step, value.text))


@edit("accumulate", "N batches before each update", takes="N", advised=("4",), risk="accuracy: a larger batch")
def accumulate(scene: Scene, value: Value) -> Scene:
    """Gradients of several batches added up."""
    passes = value.whole(most=1024)
    if scene.layout is not None:
        return scene.laid_out(global_batch=scene.layout.dp * scene.layout.micro_batch * passes)
    if passes == 1:
        return scene
    from traincast.transforms.accumulation import accumulated  # only this edit needs it

    return scene.edited(f"accumulate={passes}", lambda step: accumulated(step, passes), across=True)


@edit("overlap", "exchanges beside kernels, or not", takes="on|none")
def overlap(scene: Scene, value: Value) -> Scene:
    """Exchanges that wait for kernels and hold them up, as on one stream."""
    choice = value.choice(("on", "none"))
    if scene.layout is not None:
        on = choice == "on"
        return scene.laid_out(
            overlap_gradients=on, overlap_parameters=on, overlap_pp=on, overlap_ep=on,
            overlap_tp="backward" if on else "none",
        )  # fmt: skip
    return scene if choice == "on" else scene.edited("overlap=none", _on_one_stream, across=True)


def _on_one_stream(step: Workload) -> tuple[Workload, str]:
    if len(step.ranks) == 1:
        raise TraincastError("one GPU exchanges nothing; give `gpus` of 2 or more")
    return replace(step, programs=tuple(map(_serial, step.programs))), "exchanges run on the stream of the kernels"


def _serial(program: Program) -> Program:
    exchanges = np.array([signature.name.startswith("c10d::") for signature in program.symbolic], dtype=np.bool_)
    c = program.columns
    stream = np.where(exchanges[c.op_signature], 0, c.op_stream).astype(np.int32)
    return replace(program, columns=replace(c, op_stream=stream))

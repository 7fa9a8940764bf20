"""How gradients are reduced."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np

from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import Checkpoint
from traincast.utils.errors import TraincastError


@register_edit("bucket-mb", "size of DDP's gradient buckets, MiB", takes="N", trials=(Trial("100"),))
def change_bucket_size(resolved: Resolved, value: Value) -> Resolved:
    """Other buckets of gradients."""
    return replace(resolved, bucket_mb=value.factor(least=1e-3, most=1e6))


@register_edit(
    "checkpoint",
    "activations computed again in backward: of layers or a pattern of module paths; of described "
    "Transformers " + ", ".join(get_args(Checkpoint)),
    takes="layers|PATTERN",
    trials=(Trial("layers", "steps", "steps"), *(Trial(kind, "layouts", "layouts") for kind in ("selective", "full"))),
    excludes=("compile", "fuse-elementwise"),
    risk="the forward pass of the modules runs twice",
)
def checkpoint_modules(resolved: Resolved, value: Value) -> Resolved:
    """Less memory for more work."""
    if resolved.source == "transformer":
        return resolved.changed(checkpoint=value.choice(get_args(Checkpoint)))
    if resolved.scenario.is_compiled:
        raise TraincastError("what a compiled step computes again is the compiler's choice; leave out `compiled`")
    from traincast.transforms.checkpointing import checkpoint_layers  # only this edit needs it

    return resolved.edited(f"checkpoint={value.text}", lambda step: checkpoint_layers(step, value.text))


@register_edit(
    "accumulate", "N batches before each update", takes="N", trials=(Trial("4"),), risk="accuracy: a larger batch"
)
def accumulate(resolved: Resolved, value: Value) -> Resolved:
    """Gradients of several batches added up."""
    passes = value.whole(most=1024)
    if resolved.source == "transformer":
        layout = resolved.layout
        if layout is None:
            raise TraincastError(f"{resolved.name} only infers, which updates nothing; leave out `mode`")
        return resolved.changed(global_batch=layout.dp * layout.micro_batch * passes)
    if passes == 1:
        return resolved
    if resolved.scenario.fsdp or resolved.scenario.zero:
        raise TraincastError(
            f"{resolved.name} shares its gradients among GPUs, in which a pass may take part; ask for its passes with "
            "`global_batch`"
        )
    from traincast.transforms.accumulation import accumulate_gradients  # only this edit needs it

    return resolved.edited(f"accumulate={passes}", lambda step: accumulate_gradients(step, passes), across=True)


@register_edit("overlap", "communication that overlaps kernels: on, none, or of described Transformers a list",
      takes="on|none|KIND,KIND...")  # fmt: skip
def change_overlap(resolved: Resolved, value: Value) -> Resolved:
    """Collectives that wait for kernels and hold them up, as on one stream."""
    if resolved.source == "transformer":
        return resolved.changed(overlap=None if value.text == "on" else value.text, no_overlap=False)
    choice = value.choice(("on", "none"))
    return resolved if choice == "on" else resolved.edited("overlap=none", _put_on_one_stream, across=True)


def _put_on_one_stream(step: Workload) -> tuple[Workload, str]:
    if len(step.ranks) == 1:
        raise TraincastError("one GPU communicates nothing; give `gpus` of 2 or more")
    return replace(
        step, programs=tuple(map(_serialise_collectives, step.programs))
    ), "collectives run on the stream of the kernels"


def _serialise_collectives(program: Program) -> Program:
    exchanges = np.array([signature.name.startswith("c10d::") for signature in program.symbolic], dtype=np.bool_)
    c = program.columns
    stream = np.where(exchanges[c.op_signature], 0, c.op_stream).astype(np.int32)
    return replace(program, columns=replace(c, op_stream=stream))

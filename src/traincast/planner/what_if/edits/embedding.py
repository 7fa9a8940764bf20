"""How embedding tables are looked up."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import Embedding
from traincast.utils.errors import TraincastError

EMBEDDINGS = get_args(Embedding)


@register_edit(
    "embedding", "the operator that looks tables up", takes="|".join(EMBEDDINGS), excludes=("fuse-embedding-bags",)
)
def change_embedding(resolved: Resolved, value: Value) -> Resolved:
    """Another lookup."""
    choice = value.choice(EMBEDDINGS)
    if resolved.dlrm is not None:
        return replace(resolved, dlrm=replace(resolved.dlrm, embedding=choice)).changed(embedding=choice)
    return resolved.changed(embedding=choice)


@register_edit("fuse-embedding-bags", "one embedding bag per table becomes one table-batched op",
      trials=(Trial("", "steps"),), risk="the optimizer of the tables runs inside backward")  # fmt: skip
def fuse_embedding_bags(resolved: Resolved, value: Value) -> Resolved:
    """One table-batched lookup instead of one per table."""
    if resolved.source == "dlrm" and resolved.gpus == 1:
        now = resolved.scenario.embedding or resolved.of_dlrm().embedding
        if now != "bag":
            raise TraincastError(f"{resolved.name} looks all tables up in one op already (embedding {now})")
        return resolved.changed(embedding="batched")
    if resolved.gpus > 1 and resolved.source == "dlrm":
        raise TraincastError(f"the tables of {resolved.name} on several GPUs are FBGEMM's table-batched ones already")
    from traincast.transforms.batching import batch_bags  # a what-if reads the ops of its own edits only

    return resolved.edited("fuse-embedding-bags", batch_bags)

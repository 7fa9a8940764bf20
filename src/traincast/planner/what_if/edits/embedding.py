"""How embedding tables are looked up."""

from __future__ import annotations

from dataclasses import replace

from traincast.planner.what_if.edits.registry import Value, edit
from traincast.planner.what_if.scene import Scene
from traincast.simulator.scenario.variant import EMBEDDINGS
from traincast.utils.errors import TraincastError


@edit("embedding", "the operator that looks tables up", takes="|".join(EMBEDDINGS), excludes=("fuse-embedding-bags",))
def embedding(scene: Scene, value: Value) -> Scene:
    """Another lookup."""
    choice = value.choice(EMBEDDINGS)
    if scene.dlrm is not None:
        return replace(scene, dlrm=replace(scene.dlrm, embedding=choice)).varied(embedding=choice)
    return scene.varied(embedding=choice)


@edit("fuse-embedding-bags", "one embedding bag per table becomes one table-batched op", advised=("",),
      risk="the optimizer of the tables runs inside backward")  # fmt: skip
def fuse_embedding_bags(scene: Scene, value: Value) -> Scene:
    """One table-batched lookup instead of one per table."""
    if scene.source == "dlrm" and scene.gpus == 1:
        now = scene.question.variant.embedding or scene.of_dlrm().embedding
        if now != "bag":
            raise TraincastError(f"{scene.name} looks all tables up in one op already (embedding {now})")
        return scene.varied(embedding="batched")
    if scene.gpus > 1 and scene.source == "dlrm":
        raise TraincastError(f"the tables of {scene.name} on several GPUs are FBGEMM's table-batched ones already")
    from traincast.transforms.batching import batched_bags  # a what-if reads the ops of its own edits only

    return scene.edited("fuse-embedding-bags", batched_bags)

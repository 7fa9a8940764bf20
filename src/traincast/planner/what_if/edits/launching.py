"""How the host launches kernels."""

from __future__ import annotations

from dataclasses import replace

from traincast.planner.what_if.edits.registry import Value, edit
from traincast.planner.what_if.scene import Scene


@edit("cuda-graph", "the step replayed as CUDA graphs", advised=("",), risk="shapes and addresses must stay")
def cuda_graph(scene: Scene, value: Value) -> Scene:
    """A step that is replayed."""
    if scene.question.cuda_graph or (scene.layout is not None and scene.layout.kernels == "graph"):
        return scene
    marked = replace(scene, software=(*scene.software, "cuda-graph"))
    return marked.asked(cuda_graph=True) if scene.layout is None else marked.laid_out(kernels="graph")


@edit("stream", "all ops of a name on another stream", takes="N", target="OP", risk="the kernels share the GPU")
def stream(scene: Scene, value: Value) -> Scene:
    """Ops beside others; streams wait for each other where data crosses."""
    from traincast.transforms.streams import moved  # only this edit needs it

    number = value.whole(least=0, most=63)
    return scene.edited(f"stream:{value.target}={number}", lambda step: moved(step, value.target, number), across=True)

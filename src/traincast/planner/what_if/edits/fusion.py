"""Kernels that are joined: chains of element-wise ops, and what a compiler makes of a step."""

from __future__ import annotations

from dataclasses import replace

from traincast.planner.what_if.edits.registry import Value, edit
from traincast.planner.what_if.scene import Scene
from traincast.utils.errors import TraincastError


@edit("fuse-elementwise", "chains of element-wise ops as one kernel each", advised=("",), excludes=("compile",),
      risk="somebody must write the kernels")  # fmt: skip
def fuse_elementwise(scene: Scene, value: Value) -> Scene:
    """Fused chains; every other op stays as it is."""
    if scene.question.variant.compiled:
        raise TraincastError("a compiled step has its chains fused already; leave out `compiled`")
    from traincast.transforms.fusion import fused  # only this edit needs it

    return scene.edited("fuse-elementwise", fused)


@edit("compile", "the step as torch.compile would run it", advised=("",), risk="compilation takes minutes")
def compile_step(scene: Scene, value: Value) -> Scene:
    """A compiled step."""
    if scene.layout is not None:
        return scene.laid_out(kernels="compiled")
    if scene.question.variant.compiled:
        return scene
    return replace(scene.varied(compiled=True), software=(*scene.software, "compile"))

"""Kernels that are joined: chains of element-wise ops, and what a compiler makes of a step."""

from __future__ import annotations

from traincast.kernels.fusion import compiled_step
from traincast.kernels.registry import lowering_context
from traincast.what_if.edits.registry import Value, edit
from traincast.what_if.ops.fusing import fused
from traincast.what_if.scene import Scene
from traincast.workload.workload import Workload


@edit("fuse-elementwise", "chains of element-wise ops as one kernel each", advised=("",), excludes=("compile",),
      risk="somebody must write the kernels")  # fmt: skip
def fuse_elementwise(scene: Scene, value: Value) -> Scene:
    """Fused chains; every other op stays as it is."""
    return scene.edited("fuse-elementwise", lambda step: fused(step, views=True))


@edit("compile", "the step as torch.compile would run it", advised=("",), risk="compilation takes minutes")
def compile_step(scene: Scene, value: Value) -> Scene:
    """A compiled step."""
    if scene.layout is not None:
        return scene.laid_out(kernels="compiled")

    def compiled(step: Workload) -> tuple[Workload, str]:
        if step.mode == "inference":
            return compiled_step(step, lowering_context(step)), ""
        return fused(step, views=False)

    return scene.edited("compile", compiled, software=True)

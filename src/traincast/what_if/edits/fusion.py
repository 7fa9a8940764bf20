"""Kernels that are joined: chains of element-wise ops, and what a compiler makes of a step."""

from __future__ import annotations

from traincast.kernels.fusion import compiled_step
from traincast.kernels.registry import lowering_context
from traincast.what_if.edits.registry import Value, edit
from traincast.what_if.scene import Scene
from traincast.workload.workload import Workload


@edit("compile", "the step as torch.compile would run it", advised=("",), risk="compilation takes minutes")
def compile_step(scene: Scene, value: Value) -> Scene:
    """A compiled step."""
    if scene.layout is not None:
        return scene.laid_out(kernels="compiled")

    def compiled(step: Workload) -> tuple[Workload, str]:
        return compiled_step(step, lowering_context(step)), ""

    return scene.edited("compile", compiled, software=True)

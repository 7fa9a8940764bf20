"""Kernels that are joined: chains of element-wise ops, and what a compiler makes of a step."""

from __future__ import annotations

from dataclasses import replace

from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError


@register_edit(
    "fuse-elementwise",
    "chains of element-wise ops as one kernel each",
    trials=(Trial(""),),
    excludes=("compile",),
    risk="somebody must write the kernels",
)
def fuse_elementwise(resolved: Resolved, value: Value) -> Resolved:
    """Fused chains; every other op stays as it is."""
    if resolved.scenario.is_compiled:
        raise TraincastError("a compiled step has its chains fused already; leave out `compiled`")
    from traincast.transforms.fusion import fuse_ops  # only this edit needs it

    return resolved.edited("fuse-elementwise", fuse_ops)


@register_edit("compile", "the step as torch.compile would run it", risk="compilation takes minutes",
      trials=(Trial(""),), excludes=("kernels",))  # fmt: skip
def compile_step(resolved: Resolved, value: Value) -> Resolved:
    """A compiled step."""
    if resolved.scenario.is_compiled:
        return resolved
    return replace(resolved.changed(kernels="compiled"), software=(*resolved.software, "compile"))

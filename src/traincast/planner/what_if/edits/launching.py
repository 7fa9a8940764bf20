"""How the host launches kernels."""

from __future__ import annotations

from dataclasses import replace

from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.simulator.scenario.resolved import Resolved


@register_edit("cuda-graph", "the step replayed as CUDA graphs", risk="shapes and addresses must stay",
      trials=(Trial(""),), excludes=("kernels",))  # fmt: skip
def replay_cuda_graph(resolved: Resolved, value: Value) -> Resolved:
    """A step that is replayed."""
    if resolved.scenario.is_graphed:
        return resolved
    return replace(resolved, software=(*resolved.software, "cuda-graph")).changed(cuda_graph=True)


@register_edit(
    "stream", "all ops of a name on another stream", takes="N", target="OP", risk="the kernels share the GPU"
)
def stream(resolved: Resolved, value: Value) -> Resolved:
    """Ops alongside others; streams wait for each other where data crosses."""
    from traincast.transforms.streams import move_to_stream  # only this edit needs it

    number = value.whole(least=0, most=63)
    return resolved.edited(
        f"stream:{value.target}={number}", lambda step: move_to_stream(step, value.target, number), across=True
    )

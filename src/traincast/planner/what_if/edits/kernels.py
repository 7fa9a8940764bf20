"""Kernels as they might be: written faster, joined by fusion or a compiler, launched as CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

from traincast.costs.kernels.families import RECORDS
from traincast.hardware.links import add_default_links
from traincast.ir.workload import Workload
from traincast.planner.what_if.edits.registry import Value, register_edit
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError, make_unknown_error

COLLECTIVE = "collective"


def list_families() -> tuple[str, ...]:
    """Kernel families whose speed can be changed."""
    return (*dict.fromkeys(record.family.name for record in RECORDS), COLLECTIVE)


@register_edit(
    "speed", "kernels of a family (gemm, embedding, ...) or of an op (aten::mm) N times as fast", takes="N",
    target="FAMILY|OP", risk="somebody must write the kernel",
)  # fmt: skip
def scale_kernel_speed(resolved: Resolved, value: Value) -> Resolved:
    """The step with faster kernels. Collectives are made of links: theirs get faster, latency stays."""
    factor, target = value.factor(), value.target
    if "::" in target:
        return _scale_op_speed(resolved, target, factor)
    if target not in list_families():
        raise make_unknown_error("kernel family", target, list_families(), "Name one, or an op such as aten::mm.")
    if target == COLLECTIVE:
        topology = add_default_links(resolved.platform).topology
        assert topology is not None
        return resolved.with_topology(
            link_speed=topology.link_speed * factor,
            network_speed=topology.network_speed * factor,
            adapter_bandwidth=topology.adapter_bandwidth * factor,
        )
    corrections = dict(resolved.platform.device.corrections)
    corrections[target] = corrections.get(target, 1.0) / factor
    return resolved.with_device(corrections=corrections)


def _scale_op_speed(resolved: Resolved, name: str, factor: float) -> Resolved:
    if name.startswith("c10d::"):
        raise TraincastError(f"{name} is as fast as the links; give speed:{COLLECTIVE}, link-speed or nic-speed")

    def known(step: Workload) -> tuple[Workload, str]:
        """The step as it is, if it has such an op."""
        names = {signature.name for program in step.programs for signature in program.symbolic}
        if name not in names:
            raise make_unknown_error("op", name, names, "Name one of the step's ops.")
        return step, ""

    speeds = dict(resolved.op_speed)
    speeds[name] = speeds.get(name, 1.0) * factor
    return replace(resolved.edited(f"speed:{name}", known, across=True), op_speed=speeds)


@register_edit(
    "fuse-elementwise",
    "chains of element-wise ops as one kernel each",
    advised=("",),
    excludes=("compile",),
    risk="somebody must write the kernels",
)
def fuse_elementwise(resolved: Resolved, value: Value) -> Resolved:
    """Fused chains; every other op stays as it is."""
    if resolved.scenario.is_compiled:
        raise TraincastError("a compiled step has its chains fused already; leave out `compiled`")
    from traincast.transforms.fusion import fuse_ops  # only this edit needs it

    return resolved.edited("fuse-elementwise", fuse_ops)


@register_edit("compile", "the step as torch.compile would run it", advised=("",), risk="compilation takes minutes",
      excludes=("kernels",))  # fmt: skip
def compile_step(resolved: Resolved, value: Value) -> Resolved:
    """A compiled step."""
    if resolved.scenario.is_compiled:
        return resolved
    return replace(resolved.changed(kernels="compiled"), software=(*resolved.software, "compile"))


@register_edit("cuda-graph", "the step replayed as CUDA graphs", advised=("",), risk="shapes and addresses must stay",
      excludes=("kernels",))  # fmt: skip
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

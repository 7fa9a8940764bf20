"""Kernels that somebody could write faster: a whole family, or those of one op."""

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

"""Another GPU, more of them, faster parts of a machine, and kernels that somebody could write faster."""

from __future__ import annotations

from dataclasses import replace

from traincast.costs.host.profile import HostProfile, load_usual_host
from traincast.costs.kernels.families import RECORDS
from traincast.hardware.platform import add_default_links
from traincast.ir.workload import Workload
from traincast.planner.what_if.edits.registry import Value, register_edit
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError, make_unknown_error


@register_edit("on", "another GPU or node", takes="PLATFORM")
def change_platform(resolved: Resolved, value: Value) -> Resolved:
    """The step on another platform; a host that was asked for stays."""
    return resolved.changed(on=value.text, clock_mhz=None, power_limit_w=None)


@register_edit("gpus", "another number of GPUs, each with its own batch", takes="N")
def change_gpus(resolved: Resolved, value: Value) -> Resolved:
    """The step on another number of GPUs; of a layout the data-parallel ranks change."""
    from traincast.models.data_parallel.data_parallel import MAX_GPUS  # only this edit needs it

    number = value.whole(most=MAX_GPUS)
    batch = resolved.scenario.global_batch
    if batch is None:
        return resolved.changed(gpus=number)
    return resolved.changed(gpus=number, global_batch=batch * number // resolved.gpus)


def get_host_profile(resolved: Resolved) -> HostProfile:
    """The host profile that a step is predicted with."""
    return resolved.host or load_usual_host(resolved.platform.device)


@register_edit("host", "another host profile", takes="PROFILE", excludes=("host-speed",))
def change_host(resolved: Resolved, value: Value) -> Resolved:
    """The step on another host."""
    return resolved.changed(host=value.text)


@register_edit("host-speed", "a host N times as fast (Python, dispatch, launches)", takes="N", risk="another CPU")
def scale_host_speed(resolved: Resolved, value: Value) -> Resolved:
    """The step on a host whose overheads are all shorter."""
    return replace(resolved, host=get_host_profile(resolved).scaled(1 / value.factor()))


@register_edit("launch-speed", "kernel launches N times as fast (T4 alone)", takes="N", risk="another driver or CPU")
def scale_launch_speed(resolved: Resolved, value: Value) -> Resolved:
    """The step with cheaper runtime calls."""
    host, factor = get_host_profile(resolved), value.factor()
    return replace(resolved, host=replace(host, t4={name: seconds / factor for name, seconds in host.t4.items()}))


@register_edit("memory-speed", "device memory N times as fast", takes="N", risk="another GPU")
def scale_memory_speed(resolved: Resolved, value: Value) -> Resolved:
    """The step with another DRAM bandwidth."""
    return resolved.with_device(dram_bandwidth=resolved.platform.device.dram_bandwidth * value.factor())


@register_edit("clock-mhz", "the SM clock locked", takes="MHZ", excludes=("clock-speed",))
def lock_clock(resolved: Resolved, value: Value) -> Resolved:
    """The step with its SM clock locked."""
    clock = value.factor(least=1.0, most=1e5)
    locked = resolved.with_platform(resolved.platform.with_clock(clock))
    return replace(locked, scenario=locked.scenario.replace(clock_mhz=clock))


@register_edit(
    "clock-speed", "arithmetic N times as fast: all clocks and peaks of the GPU", takes="N", risk="another GPU"
)
def scale_clock(resolved: Resolved, value: Value) -> Resolved:
    """The step with clocks and peak rates scaled together."""
    device, factor = resolved.platform.device, value.factor()
    loaded, locked = device.loaded_clock_mhz, device.clock_mhz
    return resolved.with_device(
        boost_clock_mhz=device.boost_clock_mhz * factor,
        sustained_clock_mhz=device.sustained_clock_mhz * factor,
        loaded_clock_mhz=None if loaded is None else loaded * factor,
        clock_mhz=None if locked is None else locked * factor,
        fp16_accumulation_flops=factor * sums if (sums := device.fp16_accumulation_flops) else None,
        peak_flops={name: rate * factor for name, rate in device.peak_flops.items()},
    )


@register_edit("link-speed", "links between the GPUs of a node N times as fast", takes="N", risk="another node")
def scale_link_speed(resolved: Resolved, value: Value) -> Resolved:
    """The step with faster links inside nodes; their latency stays."""
    topology = add_default_links(resolved.platform).topology
    assert topology is not None
    return resolved.with_topology(link_speed=topology.link_speed * value.factor())


@register_edit("nic-speed", "the network between nodes N times as fast", takes="N", risk="another network")
def scale_network_speed(resolved: Resolved, value: Value) -> Resolved:
    """The step with faster network adapters; their latency stays."""
    topology, factor = add_default_links(resolved.platform).topology, value.factor()
    assert topology is not None
    return resolved.with_topology(
        network_speed=topology.network_speed * factor, adapter_bandwidth=topology.adapter_bandwidth * factor
    )


@register_edit("link-latency", "latencies of links and network N times as long", takes="N")
def scale_latency(resolved: Resolved, value: Value) -> Resolved:
    """The step with other latencies; measured curves keep their floors."""
    topology, factor = add_default_links(resolved.platform).topology, value.factor()
    assert topology is not None
    return resolved.with_topology(
        link_latency=topology.link_latency * factor, network_latency=topology.network_latency * factor
    )


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

"""Another GPU, more of them, and faster parts of a machine."""

from __future__ import annotations

from dataclasses import replace

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.hardware.links import with_links
from traincast.hardware.platform import load_platform
from traincast.planner.what_if.edits.registry import Value, edit
from traincast.planner.what_if.scene import Scene


@edit("on", "another GPU or node", takes="PLATFORM")
def other_platform(scene: Scene, value: Value) -> Scene:
    """The scene on another platform; a host that was asked for stays."""
    return scene.on(load_platform(value.text))


@edit("gpus", "another number of GPUs, each with its own batch", takes="N")
def other_gpus(scene: Scene, value: Value) -> Scene:
    """The scene on another number of GPUs; of a layout the data-parallel ranks change."""
    from traincast.models.data_parallel.data_parallel import MAX_GPUS  # only this edit needs it

    number = value.whole(most=MAX_GPUS)
    if scene.layout is None:
        return scene.asked(gpus=number)
    layout = scene.layout
    batch = layout.global_batch * number // layout.gpus if layout.global_batch else 0
    return scene.laid_out(gpus=number, global_batch=batch)


def host_of(scene: Scene) -> HostProfile:
    """The host profile that a scene is predicted with."""
    host = scene.question.host
    if isinstance(host, HostProfile):
        return host
    device = scene.platform.device
    return load_host_profile(host) if host else load_host_profile(device.host, device.host_slowness)


@edit("host", "another host profile", takes="PROFILE", excludes=("host-speed",))
def other_host(scene: Scene, value: Value) -> Scene:
    """The scene on another host."""
    return scene.asked(host=load_host_profile(value.text))


@edit("host-speed", "a host N times as fast (Python, dispatch, launches)", takes="N", risk="another CPU")
def faster_host(scene: Scene, value: Value) -> Scene:
    """The scene on a host whose overheads are all shorter."""
    return scene.asked(host=host_of(scene).scaled(1 / value.factor()))


@edit("launch-speed", "kernel launches N times as fast (T4 alone)", takes="N", risk="another driver or CPU")
def faster_launches(scene: Scene, value: Value) -> Scene:
    """The scene with cheaper runtime calls."""
    host, factor = host_of(scene), value.factor()
    return scene.asked(host=replace(host, t4={name: seconds / factor for name, seconds in host.t4.items()}))


@edit("memory-speed", "device memory N times as fast", takes="N", risk="another GPU")
def faster_memory(scene: Scene, value: Value) -> Scene:
    """The scene with another DRAM bandwidth."""
    return scene.with_device(dram_bandwidth=scene.platform.device.dram_bandwidth * value.factor())


@edit("clock-mhz", "the SM clock locked", takes="MHZ", excludes=("clock-speed",))
def locked_clock(scene: Scene, value: Value) -> Scene:
    """The scene with its SM clock locked."""
    return scene.on(scene.platform.at_clock(value.factor(least=1.0, most=1e5)))


@edit("clock-speed", "arithmetic N times as fast: all clocks and peaks of the GPU", takes="N", risk="another GPU")
def faster_clock(scene: Scene, value: Value) -> Scene:
    """The scene with clocks and peak rates scaled together."""
    device, factor = scene.platform.device, value.factor()
    loaded, locked = device.loaded_clock_mhz, device.clock_mhz
    return scene.with_device(
        boost_clock_mhz=device.boost_clock_mhz * factor,
        sustained_clock_mhz=device.sustained_clock_mhz * factor,
        loaded_clock_mhz=None if loaded is None else loaded * factor,
        clock_mhz=None if locked is None else locked * factor,
        peak_flops={name: rate * factor for name, rate in device.peak_flops.items()},
    )


@edit("link-speed", "links between the GPUs of a node N times as fast", takes="N", risk="another node")
def faster_links(scene: Scene, value: Value) -> Scene:
    """The scene with faster links inside nodes; their latency stays."""
    topology = with_links(scene.platform).topology
    assert topology is not None
    return scene.with_topology(link_speed=topology.link_speed * value.factor())


@edit("nic-speed", "the network between nodes N times as fast", takes="N", risk="another network")
def faster_network(scene: Scene, value: Value) -> Scene:
    """The scene with faster network adapters; their latency stays."""
    topology, factor = with_links(scene.platform).topology, value.factor()
    assert topology is not None
    return scene.with_topology(
        network_speed=topology.network_speed * factor, adapter_bandwidth=topology.adapter_bandwidth * factor
    )


@edit("link-latency", "latencies of links and network N times as long", takes="N")
def other_latency(scene: Scene, value: Value) -> Scene:
    """The scene with other latencies; measured curves keep their floors."""
    topology, factor = with_links(scene.platform).topology, value.factor()
    assert topology is not None
    return scene.with_topology(
        link_latency=topology.link_latency * factor, network_latency=topology.network_latency * factor
    )

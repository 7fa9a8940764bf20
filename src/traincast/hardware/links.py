"""What joins several GPUs when only the GPU was named."""

from __future__ import annotations

from dataclasses import replace

from traincast.hardware.catalog import list_node_keys
from traincast.hardware.device import Device
from traincast.hardware.platform import Platform, load_topology
from traincast.hardware.topology import PCIE_GBS, Topology, apply_device_corrections
from traincast.utils.errors import TraincastError

# a usual server where the sheet says nothing: eight GPUs, 100 Gb/s Ethernet for every four of them
_SERVER_GPUS = 8
_FABRIC = 400e9  # both directions; a slower NVLink is a bridge between two cards, which a server may or may not have
_ADAPTER_GBS = 12.5
_GPUS_PER_ADAPTER = 4


def add_default_links(platform: Platform) -> Platform:
    """The platform with a topology; where it had none, `assumed` says which was taken.

    A device file may name the node it is usual in. Otherwise it is eight to a server: joined by NVLink if that is
    fast enough to be a fabric, else by PCIe, and to other servers by 100 Gb/s for four GPUs.
    """
    if platform.topology is not None:
        return platform
    device = platform.device
    if device.node:
        if device.node not in list_node_keys():
            raise TraincastError(
                f"platform '{platform.key}' names node '{device.node}'; known are {', '.join(list_node_keys())}"
            )
        topology = load_topology(device.node)
        assumed = f"{platform.key} is one GPU; several are taken to be joined as in {device.node} (name a node instead)"
    else:
        topology = _make_default_server(device)
        kind = "its own links" if topology.island > 1 else f"PCIe {device.pcie_gen}"
        assumed = (
            f"{platform.key} is one GPU; several are taken to be {_SERVER_GPUS} to a server, joined by {kind} at "
            f"{topology.link_bandwidth / 1e9:g} GB/s (describe yours in a .yaml file)"
        )
    joined = apply_device_corrections(topology, device)
    return replace(platform, gpus_per_node=topology.gpus_per_node, topology=joined, assumed=assumed)


def _make_default_server(device: Device) -> Topology:
    host = 1e9 * PCIE_GBS.get(device.pcie_gen, PCIE_GBS[4])
    fabric = device.nvlink_bandwidth >= _FABRIC
    return Topology(
        key=f"{device.key}-server",
        gpus_per_node=_SERVER_GPUS,
        island=_SERVER_GPUS if fabric else 1,
        link_bandwidth=device.nvlink_bandwidth / 2 if fabric else host,
        host_bandwidth=host,
        adapters=_SERVER_GPUS // _GPUS_PER_ADAPTER,
        adapter_bandwidth=1e9 * _ADAPTER_GBS,
    )

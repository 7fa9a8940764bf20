"""Hardware as data: GPUs, nodes, hosts, and what joins them."""

from traincast.hardware.catalog import device_by_name, device_keys, load_device, platform_keys
from traincast.hardware.device import Device
from traincast.hardware.platform import Platform, load_platform, load_topology
from traincast.hardware.topology import Topology

__all__ = [
    "Device",
    "Platform",
    "Topology",
    "device_by_name",
    "device_keys",
    "load_device",
    "load_platform",
    "load_topology",
    "platform_keys",
]

"""Hardware as data: GPUs, nodes, hosts, and what joins them."""

from traincast.hardware.device import Device
from traincast.hardware.platform import (
    Platform,
    find_device_by_name,
    list_device_keys,
    list_platform_keys,
    load_device,
    load_platform,
    load_topology,
)
from traincast.hardware.topology import Topology

__all__ = [
    "Device",
    "Platform",
    "Topology",
    "find_device_by_name",
    "list_device_keys",
    "list_platform_keys",
    "load_device",
    "load_platform",
    "load_topology",
]

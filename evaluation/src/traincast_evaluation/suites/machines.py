"""The machine of a published row: its GPU, its node and how many of them, from the row's own words."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from traincast.hardware.platform import (
    Platform,
    find_device_by_name,
    list_device_keys,
    list_device_names,
    list_node_keys,
    load_device,
    load_platform,
)
from traincast.hardware.topology import Topology
from traincast.utils.errors import TraincastError, make_unknown_error
from traincast_evaluation.suites.published import Row

# words of an accelerator's text -> device, node; the first line of which every word is found. The first round does not
# say the memory of its A100: it had 40 GB
_ACCELERATORS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("A100", "PCI", "40GB"), "a100-40gb-pcie", "pcie-a100"),
    (("A100", "PCI", "80GB"), "a100-80gb-pcie", "pcie-a100"),
    (("A100", "SXM", "40GB"), "a100-40gb", "dgx-a100"),
    (("A100", "SXM", "80GB"), "a100-80gb", "dgx-a100"),
    (("H100", "NVL"), "h100-nvl", "pcie-h100-nvl"),
    (("H100", "PCI"), "h100-pcie", "pcie-h100-pairs"),
    (("H100", "SXM", "80GB"), "h100", "dgx-h100"),
    (("H200", "NVL"), "h200-nvl", "pcie-h200-nvl"),
    (("H200",), "h200", "hgx-h200"),
    (("GB200",), "gb200", "gb200-nvl72"),
    (("GB300",), "gb300", "gb300-nvl72"),
    (("B200",), "b200", "hgx-b200"),
    (("B300",), "b300", "hgx-b300"),
    (("L40S",), "l40s", "pcie-l40s"),
)
_EXACT = {"NVIDIA A100": ("a100-40gb", "dgx-a100")}
_WITHOUT_PEERS = {"pcie-a100": "pcie-a100-no-peer"}
_LARGEST_SERVER = 16  # GPUs of a node, racks joined by NVLink left out
_NO_PEERS = ("v1.0",)
"""MLPerf rounds whose PCIe systems did without peer access; set with one of their rows in view, 50 times the others."""


def read_machine(row: Row) -> Platform:
    """The platform of an MLPerf row: the node that its accelerator is sold in, with as many of them as the row says."""
    device, node = _read_accelerator(row)
    if row["mlperf_round"] in _NO_PEERS:
        node = _WITHOUT_PEERS.get(node, node)
    gpus, nodes, per_node = (row.count(name) for name in ("num_gpus", "num_nodes", "gpus_per_node"))
    if gpus != nodes * per_node:
        raise TraincastError(
            f"'{row.file}', row {row.number}: {nodes} nodes of {per_node} GPUs are not {gpus} GPUs; correct the row"
        )
    return load_node_of_size(node, device, per_node)


@cache
def load_node_of_size(node: str, device: str, per_node: int) -> Platform:
    """A built-in node with these GPUs, `per_node` of them behind its links."""
    platform = load_platform(node)
    assert platform.topology is not None
    topology = resize_node(platform.topology, per_node)
    return replace(platform, device=load_device(device), topology=topology, gpus_per_node=per_node)


def resize_node(topology: Topology, per_node: int) -> Topology:
    """The same links with as many GPUs to a node, and as many adapters to a GPU."""
    island = per_node if topology.island == topology.gpus_per_node else min(topology.island, per_node)
    adapters = max(1, topology.adapters * per_node // topology.gpus_per_node)
    return replace(topology, gpus_per_node=per_node, island=island, adapters=adapters)


def fit_node(topology: Topology, per_node: int) -> Topology:
    """A node with as many GPUs as a source says, racks joined by NVLink left as they are."""
    smaller = 1 < per_node < topology.gpus_per_node <= _LARGEST_SERVER
    return resize_node(topology, per_node) if smaller else topology


def find_named_device(text: str) -> str:
    """The key of a built-in device that a source names as drivers do, or else the longest of those that stand in its
    text as words ("": none does)."""
    if text in list_device_names():
        return find_device_by_name(text).key
    words = re.sub("[^a-z0-9]+", "-", text.lower())
    return max((key for key in list_device_keys() if f"-{key}-" in f"-{words}-"), key=len, default="")


def _read_accelerator(row: Row) -> tuple[str, str]:
    """Keys of the row's device and node; what is not built in is rejected by name."""
    text = row["accelerator"].upper()
    found = _EXACT.get(text) or next(
        ((device, node) for words, device, node in _ACCELERATORS if all(word in text for word in words)), None
    )
    if found is None and (named := find_named_device(text)):
        found = named, load_device(named).node
    if found is None or found[0] not in list_device_keys() or found[1] not in list_node_keys():
        known = [" ".join(words) for words, device, node in _ACCELERATORS if device in list_device_keys()]
        place = f"It stands in '{row.file}', row {row.number}; known are {', '.join(known)}."
        raise make_unknown_error("accelerator", row.label("accelerator"), known, place)
    return found

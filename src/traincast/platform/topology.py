"""What joins GPUs: links inside a node, adapters between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from traincast.errors import TraincastError
from traincast.platform.device import Device
from traincast.platform.files import known_fields, number
from traincast.platform.mesh import Links, all_to_all_load, connected, ring_count

PCIE_GBS = {2: 8.0, 3: 16.0, 4: 32.0, 5: 64.0, 6: 128.0}  # x16, one direction, data sheet
_DEFAULT_PCIE = 4  # of a node that names no device, and of generations not listed: the usual one since 2020
_MAX_GPUS_PER_NODE = 1024  # beyond any machine; a larger number is a mistake
_MAX_MESH = 8  # rings over point-to-point links are counted by search
_FIELDS = (
    "name", "device", "gpus_per_node", "link_gbs", "island", "host_gbs", "adapters", "network_gbs_per_gpu",
    "link_latency_us", "network_latency_us", "links", "curves", "source", "notes",
)  # fmt: skip
LINK_LATENCY_US = 1.5  # assumed, as are the network's: the links' launch and steps are fitted on top of them
NETWORK_LATENCY_US = 5.0


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A cluster of equal nodes. Bandwidths are bytes per second in one direction, latencies seconds per hop.

    `link_bandwidth` is what one GPU can send over its fast links, which join `island` GPUs at a time (a whole node
    behind NVSwitch, two with bridges, one when there is only PCIe); GPUs of different islands talk at
    `host_bandwidth`. `links` lists point-to-point links (GPU, GPU, how many) where there is no switch. A node has
    `adapters` network adapters of `adapter_bandwidth` each. `curves` names fitted curves; empty: links alone decide.
    """

    key: str
    gpus_per_node: int
    island: int
    link_bandwidth: float
    host_bandwidth: float
    adapters: int
    adapter_bandwidth: float
    link_latency: float = LINK_LATENCY_US / 1e6
    network_latency: float = NETWORK_LATENCY_US / 1e6
    links: Links = ()
    curves: str = ""

    def nodes_for(self, gpus: int) -> int:
        """How many nodes hold this many GPUs."""
        if gpus < 1:
            raise TraincastError(f"cannot use {gpus} GPUs; give 1 or more")
        return -(-gpus // self.gpus_per_node)

    def ring_bandwidth(self, ranks: int) -> float:
        """Bus bandwidth that the links of one node offer to a ring (or tree) over its first `ranks` GPUs."""
        if self.links:
            wire = self._wire_bandwidth()
            rings = ring_count(self.links, ranks)
            if rings:
                return rings * wire
            # no closed loop: one tree over the links, each carrying the message up and down
            if connected(self.links, ranks):
                return wire * 2 * (ranks - 1) / ranks
            return self.host_bandwidth
        return self.link_bandwidth if ranks <= self.island else self.host_bandwidth

    def all_to_all_bandwidth(self, ranks: int) -> float:
        """What each of the first `ranks` GPUs of a node can send when all send to all."""
        if self.links:
            load = all_to_all_load(self.links, ranks)
            return max((ranks - 1) * self._wire_bandwidth() / load, self.host_bandwidth)
        if ranks <= self.island:
            return self.link_bandwidth
        beyond = (ranks - self.island) / (ranks - 1)
        return min(self.link_bandwidth, self.host_bandwidth / beyond)

    def network_bandwidth(self, ranks_per_node: int) -> float:
        """What a node can send to other nodes when `ranks_per_node` of its GPUs take part."""
        share = max(1.0, self.adapters * ranks_per_node / self.gpus_per_node)
        return min(share, float(self.adapters)) * self.adapter_bandwidth

    def _wire_bandwidth(self) -> float:
        wires = [sum(count for a, b, count in self.links if gpu in (a, b)) for gpu in range(self.gpus_per_node)]
        return self.link_bandwidth / max(wires)


def topology_from(key: str, table: dict[str, Any], device: Device | None) -> Topology:
    """A topology from the fields of a node file; `device` is the one it names (None: it names none)."""
    known_fields(key, table, _FIELDS)
    gpus = number(key, table, "gpus_per_node", integer=True)
    if gpus > _MAX_GPUS_PER_NODE:
        raise TraincastError(f"platform '{key}': gpus_per_node is {gpus}; at most {_MAX_GPUS_PER_NODE} are supported")
    link = number(key, table, "link_gbs")
    adapters = number(key, table, "adapters", integer=True) if "adapters" in table else gpus
    island = number(key, table, "island", integer=True) if "island" in table else gpus
    return Topology(
        key=key,
        gpus_per_node=gpus,
        island=min(island, gpus),
        link_bandwidth=1e9 * link,
        host_bandwidth=1e9 * (link if island == 1 else _host_gbs(key, table, device)),
        adapters=adapters,
        adapter_bandwidth=1e9 * number(key, table, "network_gbs_per_gpu") * gpus / adapters,
        link_latency=1e-6 * _optional(key, table, "link_latency_us", LINK_LATENCY_US),
        network_latency=1e-6 * _optional(key, table, "network_latency_us", NETWORK_LATENCY_US),
        links=_links(key, table.get("links", []), gpus),
        curves=str(table.get("curves", "")),
    )


def _optional(key: str, table: dict[str, Any], field: str, default: float) -> float:
    return float(number(key, table, field)) if field in table else default


def _host_gbs(key: str, table: dict[str, Any], device: Device | None) -> float:
    default = PCIE_GBS.get(device.pcie_gen if device else _DEFAULT_PCIE, PCIE_GBS[_DEFAULT_PCIE])
    return _optional(key, table, "host_gbs", default)


def _links(key: str, rows: Any, gpus: int) -> Links:
    if not isinstance(rows, list):
        raise TraincastError(f"platform '{key}': 'links' must be a list of [gpu, gpu, count]")
    if rows and gpus > _MAX_MESH:
        raise TraincastError(f"platform '{key}': 'links' is for at most {_MAX_MESH} GPUs; leave it out for a switch")
    links = []
    for row in rows:
        if not (isinstance(row, list) and len(row) == 3 and all(type(value) is int for value in row)):
            raise TraincastError(f"platform '{key}': link {row!r} is not [gpu, gpu, count]")
        a, b, wires = row
        if not (0 <= a < gpus and 0 <= b < gpus and a != b and 1 <= wires <= 64):
            raise TraincastError(f"platform '{key}': link {row!r} needs two GPUs below {gpus} and 1 to 64 wires")
        links.append((min(a, b), max(a, b), wires))
    if len({link[:2] for link in links}) != len(links):
        raise TraincastError(f"platform '{key}': 'links' names a pair of GPUs twice; give each pair once")
    return tuple(sorted(links))

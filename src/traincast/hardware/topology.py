"""What joins GPUs: links inside a node (rings and flows over a cube mesh), adapters between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any

from traincast.hardware.device import Device
from traincast.hardware.sheet import check_known_fields, read_number_in_range
from traincast.utils.errors import TraincastError, shorten_value

Links = tuple[tuple[int, int, int], ...]


@cache
def count_rings(links: Links, ranks: int) -> int:
    """How many one-way rings over GPUs 0..ranks-1 can run at once, each with a link of its own on every hop.

    A link carries both directions, so every closed loop of three or more GPUs serves two rings.

    >>> ring_count(((0, 1, 1), (1, 2, 1), (0, 2, 1)), 3)
    2
    """
    capacity = _count_links(links, ranks)
    if ranks == 2:
        return capacity.get((0, 1), 0)
    if len(capacity) == ranks * (ranks - 1) // 2 and len(set(capacity.values())) == 1:
        # every GPU joined to every other: all links are used at once (measured on 2, 4 and 8 MI350X)
        return capacity[0, 1] * (ranks - 1)
    return 2 * _count_disjoint_loops(list(_find_loops(capacity, ranks)), capacity)


@cache
def compute_all_to_all_load(links: Links, ranks: int) -> float:
    """Pair messages that the busiest link direction carries when every GPU sends one to every other.

    Neighbours use their own links; others take one hop over the GPU in between with the least load. Infinite when some
    pair is further apart.
    """
    capacity = _count_links(links, ranks)
    load = {(a, b): 1.0 / wires for (i, j), wires in capacity.items() for a, b in ((i, j), (j, i))}
    wires_of = {(a, b): wires for (i, j), wires in capacity.items() for a, b in ((i, j), (j, i))}
    for a in range(ranks):
        for b in range(ranks):
            if a == b or (a, b) in wires_of:
                continue
            via = [v for v in range(ranks) if (a, v) in wires_of and (v, b) in wires_of]
            if not via:
                return float("inf")
            best = min(via, key=lambda v: (max(load[a, v], load[v, b]), v))
            for hop in ((a, best), (best, b)):
                load[hop] += 1.0 / wires_of[hop]
    return max(load.values())


def count_most_strangers(links: Links, ranks: int) -> int:
    """To how many of GPUs 0..ranks-1 the one with the fewest neighbours among them has no link.

    >>> count_most_strangers(((0, 1, 1), (1, 2, 1)), 3)
    1
    """
    joined = _count_links(links, ranks)
    return max(ranks - 1 - sum(gpu in pair for pair in joined) for gpu in range(ranks))


def is_connected(links: Links, ranks: int) -> bool:
    """Whether links join GPUs 0..ranks-1."""
    capacity = _count_links(links, ranks)
    reached = {0}
    while True:
        more = {b for i, j in capacity for a, b in ((i, j), (j, i)) if a in reached} - reached
        if not more:
            return len(reached) == ranks
        reached |= more


def _count_links(links: Links, ranks: int) -> dict[tuple[int, int], int]:
    return {(min(a, b), max(a, b)): wires for a, b, wires in links if max(a, b) < ranks}


def _find_loops(capacity: dict[tuple[int, int], int], ranks: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every closed loop through all GPUs, once per direction-less loop, as its links."""

    def extend(path: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
        if len(path) == ranks:
            if path[1] < path[-1] and (0, path[-1]) in capacity:
                yield tuple((min(a, b), max(a, b)) for a, b in zip(path, [*path[1:], 0], strict=True))
            return
        for nxt in range(1, ranks):
            if nxt not in path and (min(path[-1], nxt), max(path[-1], nxt)) in capacity:
                yield from extend([*path, nxt])

    return extend([0])


def _count_disjoint_loops(loops: list[tuple[tuple[int, int], ...]], capacity: dict[tuple[int, int], int]) -> int:
    """The most loops that fit into the links together."""
    usable = [loop for loop in loops if all(capacity[link] > 0 for link in loop)]
    best = 0
    for position, loop in enumerate(usable):
        left = dict(capacity)
        for link in loop:
            left[link] -= 1
        best = max(best, 1 + _count_disjoint_loops(usable[position:], left))
        if best * 2 >= min(_count_degrees(capacity)):  # a loop takes two links of every GPU: no more can fit
            break
    return best


def _count_degrees(capacity: dict[tuple[int, int], int]) -> list[int]:
    degree: dict[int, int] = {}
    for (a, b), wires in capacity.items():
        degree[a] = degree.get(a, 0) + wires
        degree[b] = degree.get(b, 0) + wires
    return [max(1, d) for d in degree.values()]


PCIE_GBS = {2: 8.0, 3: 16.0, 4: 32.0, 5: 64.0, 6: 128.0}  # x16, one direction, data sheet
_DEFAULT_PCIE = 4  # of a node that names no device, and of generations not listed: the usual one since 2020
_MAX_MESH = 8  # rings over point-to-point links are counted by search
_FIELDS = (
    "name", "device", "gpus_per_node", "link_gbs", "island", "host_gbs", "adapters", "network_gbs_per_gpu",
    "rendezvous_us", "link_latency_us", "network_latency_us", "links", "curves", "peer_access", "gpus_per_host_link",
    "through_host_gbs", "host", "source", "notes",
)  # fmt: skip
# least and most that any node has, several times over: outside, a figure is in another unit
_RANGES = {
    "gpus_per_node": (1.0, 1024.0),
    "island": (1.0, 1024.0),
    "adapters": (1.0, 1024.0),
    "gpus_per_host_link": (1.0, 64.0),
    "link_gbs": (0.1, 20_000.0),
    "host_gbs": (0.1, 20_000.0),
    "through_host_gbs": (0.01, 20_000.0),
    "network_gbs_per_gpu": (0.01, 20_000.0),
    "link_latency_us": (0.01, 1000.0),
    "network_latency_us": (0.01, 100_000.0),
    "rendezvous_us": (0.0, 100_000.0),
}
LINK_LATENCY_US = 1.5  # assumed, as are the network's: the links' launch and steps are fitted on top of them
NETWORK_LATENCY_US = 5.0
EAGER_BYTES = 2.0**14
"""Messages up to here leave before their receiver has said where they go, on networks where longer ones wait."""
# without peer access every byte passes host memory twice, and what crosses the host grows with the GPUs: on eight L40S
# the rate of one falls with this power of their number (set on 2 and 4; 8 follow, see docs/evidence/collectives.md)
_NO_PEER_FALL = 2.0
_STAGED = 0.85  # of a host link through host memory, before what NCCL loses on every link: two L40S, 20 of 32 GB/s


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A cluster of equal nodes. Bandwidths are bytes per second in one direction, latencies seconds per hop.

    `link_bandwidth` is what one GPU can send over its fast links, which join `island` GPUs at a time (a whole node
    behind NVSwitch, two with bridges, one when there is only PCIe); GPUs of different islands talk at
    `host_bandwidth`, less where `peer_access` is missing and bytes go through host memory, which takes
    `through_host_bandwidth` of each at most. `links` lists
    point-to-point links (GPU, GPU, how many) where there is no switch. `gpus_per_host_link` GPUs are behind one PCIe
    switch and share its link to the host, and to GPUs behind other switches. `relays`: GPUs pass on what their
    neighbours send each other (NCCL since 2.8); else messages between GPUs without a link go through host memory. A
    node has `adapters` network adapters of
    `adapter_bandwidth` each; a message above `EAGER_BYTES` first asks its receiver, which takes `rendezvous` more
    (Slingshot). `curves` names fitted curves; empty: links alone decide. `link_speed` and `network_speed`
    are how many times as fast bytes travel inside and between nodes as measured or described (a what-if).
    `corrections` are factors on the time of collectives inside a node by kind, from measurements of one. `shared`: all
    GPUs of a node communicate at once, each in its own group, and share the adapters (a step); else one group of ranks
    is alone on the network (a benchmark on some GPUs of each node).
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
    rendezvous: float = 0.0
    links: Links = ()
    curves: str = ""
    peer_access: bool = True
    through_host_bandwidth: float = inf
    gpus_per_host_link: int = 1
    relays: bool = True
    link_speed: float = 1.0
    network_speed: float = 1.0
    corrections: tuple[tuple[str, float], ...] = ()
    shared: bool = True

    def get_correction(self, kinds: Sequence[str]) -> float:
        """The factor of the first of these kinds of collective that has one (else 1)."""
        factors = dict(self.corrections)
        return next((factors[kind] for kind in kinds if kind in factors), 1.0)

    def count_nodes(self, gpus: int) -> int:
        """How many nodes hold this many GPUs."""
        if gpus < 1:
            raise TraincastError(f"cannot use {gpus} GPUs; give 1 or more")
        return -(-gpus // self.gpus_per_node)

    def get_ring_bandwidth(self, ranks: int) -> float:
        """Bus bandwidth that the links of one node offer to a ring (or tree) over its first `ranks` GPUs."""
        if self.links:
            wire = self._get_wire_bandwidth()
            rings = count_rings(self.links, ranks)
            if rings:
                return rings * wire
            # no closed loop: one tree over the links, each carrying the message up and down
            if is_connected(self.links, ranks):
                return wire * 2 * (ranks - 1) / ranks
            return self.host_bandwidth
        return self.link_bandwidth if ranks <= self.island else self.get_host_bandwidth(ranks)

    def get_all_to_all_bandwidth(self, ranks: int) -> float:
        """What each of the first `ranks` GPUs of a node can send when all send to all."""
        if self.links:
            load = compute_all_to_all_load(self.links, ranks)
            relayed = max((ranks - 1) * self._get_wire_bandwidth() / load, self.host_bandwidth)
            strangers = 0 if self.relays else count_most_strangers(self.links, ranks)
            staged = _STAGED * self.host_bandwidth / self.gpus_per_host_link
            return min(relayed, (ranks - 1) * staged / strangers) if strangers else relayed
        if ranks <= self.island:
            return self.link_bandwidth
        beyond = (ranks - self.island) / (ranks - 1)
        return min(self.link_bandwidth, self.get_host_bandwidth(ranks) / beyond, self._get_switch_bandwidth(ranks))

    def _get_switch_bandwidth(self, ranks: int) -> float:
        """What each of `ranks` GPUs can send to all when those behind one PCIe switch share the link that leaves it."""
        sharers = self.gpus_per_host_link
        near = max(sharers, self.island)  # reached without that link
        if not self.peer_access or sharers == 1 or ranks <= near:
            return self.link_bandwidth
        return self.host_bandwidth / sharers * (ranks - 1) / (ranks - near)

    def count_host_sharers(self, gpus: int) -> int:
        """How many of `gpus` GPUs that all work copy over one host link."""
        return min(gpus, self.gpus_per_host_link)

    def get_host_bandwidth(self, ranks: int) -> float:
        """What each of `ranks` GPUs can send beyond its island when all do."""
        if self.peer_access:
            return self.host_bandwidth
        if self.through_host_bandwidth < inf:
            return min(self.host_bandwidth, self.through_host_bandwidth)
        fall: float = (2 / ranks) ** _NO_PEER_FALL
        return self.host_bandwidth * fall

    def get_network_bandwidth(self, ranks_per_node: int) -> float:
        """What a group with `ranks_per_node` GPUs of each node can send from one node to others."""
        share = self.adapters * ranks_per_node / self.gpus_per_node
        return min(share if self.shared else max(1.0, share), float(self.adapters)) * self.adapter_bandwidth

    def count_ranks_per_node(self, ranks: int, nodes: int) -> int:
        """How many of `ranks` ranks on `nodes` nodes are on the fullest one: they fill one node after the other, evenly
        spaced.

        >>> Topology(key="n", gpus_per_node=8, island=8, link_bandwidth=1.0, host_bandwidth=1.0, adapters=8,
        ...          adapter_bandwidth=1.0).count_ranks_per_node(12, 2)
        8
        """
        even = -(-ranks // nodes)
        fits = (n for n in range(even, self.gpus_per_node + 1) if self.gpus_per_node % n == 0)
        return next((n for n in fits if -(-ranks // n) == nodes), even)

    def find_differing_field(self, other: Topology) -> str:
        """The field of a node's file in which the links inside the nodes differ ("": none).

        That a node holds fewer or more GPUs is no difference where the links join all of them.
        """
        whole = self.island == self.gpus_per_node, other.island == other.gpus_per_node
        differs = {
            "link_gbs": self.link_bandwidth != other.link_bandwidth,
            "link_latency_us": self.link_latency != other.link_latency,
            "island": whole[0] != whole[1],
            "links": self.links != other.links,
            "peer_access": self.peer_access != other.peer_access,
        }
        return next((field for field, different in differs.items() if different), "")

    def _get_wire_bandwidth(self) -> float:
        wires = [sum(count for a, b, count in self.links if gpu in (a, b)) for gpu in range(self.gpus_per_node)]
        return self.link_bandwidth / max(wires)


COLLECTIVE = "collective "
"""How the names of those of a device's corrections begin that are of collectives."""


def apply_device_corrections(topology: Topology, device: Device) -> Topology:
    """The topology with what the device's corrections say of collectives."""
    found = {name: factor for name, factor in device.corrections.items() if name.startswith(COLLECTIVE)}
    return replace(topology, corrections=tuple((name.removeprefix(COLLECTIVE), found[name]) for name in sorted(found)))


def make_topology(key: str, table: dict[str, Any], device: Device | None) -> Topology:
    """A topology from the fields of a node file; `device` is the one it names (None: it names none)."""
    check_known_fields(key, table, _FIELDS)
    gpus = int(_read_number(key, table, "gpus_per_node", integer=True))
    link = _read_number(key, table, "link_gbs")
    adapters = int(_read_number(key, table, "adapters", gpus, integer=True))
    island = int(_read_number(key, table, "island", gpus, integer=True))
    return Topology(
        key=key,
        gpus_per_node=gpus,
        island=min(island, gpus),
        link_bandwidth=1e9 * link,
        host_bandwidth=1e9 * (link if island == 1 else _read_host_gbs(key, table, device)),
        adapters=adapters,
        adapter_bandwidth=1e9 * _read_number(key, table, "network_gbs_per_gpu") * gpus / adapters,
        link_latency=1e-6 * _read_number(key, table, "link_latency_us", LINK_LATENCY_US),
        network_latency=1e-6 * _read_number(key, table, "network_latency_us", NETWORK_LATENCY_US),
        rendezvous=1e-6 * _read_number(key, table, "rendezvous_us", 0.0),
        links=_read_links(key, table.get("links", []), gpus),
        curves=str(table.get("curves", "")),
        peer_access=_read_peer_access(key, table.get("peer_access", True)),
        through_host_bandwidth=1e9 * _read_number(key, table, "through_host_gbs", inf),
        gpus_per_host_link=int(_read_number(key, table, "gpus_per_host_link", 1, integer=True)),
    )


def _read_peer_access(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TraincastError(f"platform '{key}': 'peer_access' is {shorten_value(value)}; give true or false")
    return value


def _read_number(
    key: str, table: dict[str, Any], field: str, default: float | None = None, *, integer: bool = False
) -> float:
    return read_number_in_range(key, table, field, _RANGES, "node", integer=integer, default=default)


def _read_host_gbs(key: str, table: dict[str, Any], device: Device | None) -> float:
    default = PCIE_GBS.get(device.pcie_gen if device else _DEFAULT_PCIE, PCIE_GBS[_DEFAULT_PCIE])
    return _read_number(key, table, "host_gbs", default)


def _read_links(key: str, rows: Any, gpus: int) -> Links:
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

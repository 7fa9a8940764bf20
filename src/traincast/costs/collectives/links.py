"""Collective calls, and their times from links alone: launch, hops, and bytes over the busiest link, by NCCL or by a
library of its own.

This is what an unknown cluster gets, what carries measured nodes to several nodes, and what scales measured rank counts
to others. Its few coefficients are pooled over all measured machines.

Inside a node one kernel reads or writes the memory of node mates over the links. Between nodes host threads, one for
every GPU, see a flag of their GPU and post writes from its memory to that of other nodes; what has come sets a flag
there. Sums are made by switches on the way (SHARP).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.collective import COLLECTIVE
from traincast.hardware.topology import EAGER_BYTES, Topology
from traincast.ir.collectives import COLLECTIVES, Route
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError

__all__ = ["COLLECTIVE", "get_bus_factor", "share_bytes_evenly"]


def get_bus_factor(kind: str, ranks: int) -> float:
    """How many times the busiest link of a node carries the message: bus bandwidth = bytes * factor / seconds.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    record = COLLECTIVES[kind]
    return record.bus_whole + record.bus_share * ((ranks - 1) / ranks)


def share_bytes_evenly(splits: npt.ArrayLike, node: Sequence[int] | None = None) -> float:
    """`bytes` of the even all-to-all that takes as long as this uneven one.

    `splits[i][j]` bytes go from rank i to rank j. The collective lasts as long as its busiest sender or receiver; with
    `node` (the node of every rank), also as long as the node that sends or receives most over the network.

    >>> even_bytes([[0, 10, 10, 10], [20, 0, 20, 20], [10, 10, 0, 10], [10, 10, 10, 0]])
    80.0
    """
    matrix = np.array(splits, dtype=np.float64)
    ranks = len(matrix)
    if matrix.shape != (ranks, ranks) or ranks < 2 or not np.all(np.isfinite(matrix)) or np.any(matrix < 0):
        raise TraincastError("all-to-all splits must be a square table of sizes >= 0 in bytes, two ranks or more")
    np.fill_diagonal(matrix, 0.0)
    busiest = max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max())
    even = busiest * ranks / (ranks - 1)
    if node is None or len(set(node)) < 2:
        return float(even)
    if len(node) != ranks:
        raise TraincastError(f"all-to-all splits are for {ranks} ranks, but {len(node)} ranks were given a node")
    places = np.asarray(node)
    across = matrix * (places[:, None] != places[None, :])
    names = np.unique(places)
    sent = max(across[places == name].sum() for name in names)
    received = max(across[:, places == name].sum() for name in names)
    nodes = len(names)
    return float(max(even, max(sent, received) * nodes / (ranks / nodes * (nodes - 1))))


FLAGS_SLOWDOWN = 4.0  # small messages use the flag-carrying protocols, at about a quarter of the bandwidth
FLAGS_BYTES = 65536  # rings over nodes use them up to here: seen on two clusters of A100, Sophia and Polaris
_WHOLE_LATENCY = 1.7  # a hop of a tree with whole chunks, of one with flags: NCCL's tuning expects 8.5 and 5.0 us
# from NVLink 4 on a channel inside a node is faster than an adapter, and NCCL joins two nodes by trees: each sends its
# sum once, not 2 (n - 1) / n times. Found on Alps, and so on two clusters of H100 and two racks of GB200
_TREE_LINK = 4e11


@dataclass(frozen=True, kw_only=True)
class NodeCoefficients:
    """seconds = launch + hops * steps * link latency + ramp * sqrt(x) + slowdown * x, with x = bytes / link bandwidth.

    `launch` is in seconds and `ramp` in square root of seconds; the others have no unit.
    """

    launch: float
    hops: float
    ramp: float
    slowdown: float


@dataclass(frozen=True, kw_only=True)
class NetworkCoefficients:
    """Between nodes: hops * (ranks - 1) * network latency + slowdown * bytes / bandwidth, on top of the node's floor.

    A ring that leaves the node reaches `span` of the bandwidth it has inside.
    """

    hops: float
    slowdown: float
    span: float


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Coefficients by kind, and the spread of log time (`sigma` inside a node, `network_sigma` across)."""

    node: dict[str, NodeCoefficients]
    network: dict[str, NetworkCoefficients]
    sigma: float
    network_sigma: float

    def floor(self, kind: str, ranks: int, topology: Topology) -> float:
        """Seconds of an empty message inside a node."""
        coefficients = self.node[name_measured_kind(kind)]
        return coefficients.launch + coefficients.hops * count_ring_steps(kind, ranks) * topology.link_latency

    def inside(self, kind: str, message: FloatArray, ranks: int, topology: Topology) -> FloatArray:
        """Seconds inside one node."""
        coefficients = self.node[name_measured_kind(kind)]
        x = message * get_bus_factor(kind, ranks) / get_node_bandwidth(kind, ranks, topology)
        return self.floor(kind, ranks, topology) + coefficients.ramp * np.sqrt(x) + coefficients.slowdown * x

    def node_rate(self, kind: str, ranks: int, topology: Topology) -> float:
        """Bus bandwidth in bytes per second that the largest messages reach inside a node."""
        return get_node_bandwidth(kind, ranks, topology) / self.node[name_measured_kind(kind)].slowdown

    def across(
        self, kind: str, message: FloatArray, ranks: int, nodes: int, topology: Topology, *, floor: float, rate: float
    ) -> FloatArray:
        """Seconds across nodes, given the floor and the bus bandwidth (`rate`) of the ranks of one node."""
        network = self.network[name_measured_kind(kind)]
        x = estimate_network_seconds(kind, message, ranks, nodes, topology, span=network.span, rate=rate)
        route = COLLECTIVES[kind].route

        def estimate_hop(nbytes: FloatArray) -> FloatArray:
            asks = np.where(nbytes > EAGER_BYTES, topology.rendezvous, 0.0)
            return np.asarray(network.hops * (topology.network_latency + asks))

        if route is Route.PAIR:
            return np.asarray(floor + estimate_hop(message) + network.slowdown * x)
        ring = floor + estimate_hop(message / ranks) * (ranks - 1) + network.slowdown * x
        if not runs_on_ring(kind):
            return np.asarray(ring)
        flagged = floor + FLAGS_SLOWDOWN * network.slowdown * x
        if route is Route.RING_OR_TREE:
            levels = 2 * np.ceil(np.log2(nodes))
            flagged = flagged + estimate_hop(FLAGS_SLOWDOWN * message) * levels
            fastest = np.minimum(ring, flagged)
            if not joins_by_tree(ranks, nodes, topology):
                return np.asarray(fastest)
            adapters = topology.get_network_bandwidth(topology.count_ranks_per_node(ranks, nodes))
            stream = network.slowdown * message * max(1.0 / adapters, 2.0 / rate)
            # all levels work at once, on parts as long as make the whole shortest
            tree = floor + (np.sqrt(_WHOLE_LATENCY * levels * estimate_hop(message)) + np.sqrt(stream)) ** 2
            return np.asarray(np.minimum(fastest, tree))
        # every part of a short message goes its own way, over the network as often as it changes nodes
        mates = self.node[name_measured_kind(kind)].hops * topology.link_latency * (ranks - nodes)
        flagged = flagged + estimate_hop(message / ranks) * (nodes - 1) + mates
        return np.where(message <= FLAGS_BYTES, np.minimum(ring, flagged), ring)

    def to_json(self) -> dict[str, Any]:
        """The model as plain data."""
        plain: dict[str, Any] = _round_number(asdict(self))
        return plain

    @staticmethod
    def from_json(entry: dict[str, Any]) -> LinkModel:
        """The model from its plain data."""
        return LinkModel(
            node={kind: NodeCoefficients(**numbers) for kind, numbers in entry["node"].items()},
            network={kind: NetworkCoefficients(**numbers) for kind, numbers in entry["network"].items()},
            sigma=float(entry["sigma"]),
            network_sigma=float(entry["network_sigma"]),
        )


def name_measured_kind(kind: str) -> str:
    """The collective whose coefficients and curves stand for this one: itself, or one that moves its bytes alike."""
    return COLLECTIVES[kind].like or kind


def runs_on_ring(kind: str) -> bool:
    """Whether the bytes of a collective go round a ring inside a node."""
    return COLLECTIVES[kind].route in (Route.RING, Route.RING_OR_TREE)


def joins_by_tree(ranks: int, nodes: int, topology: Topology) -> bool:
    """Whether a sum goes over the network once, as between two nodes whose links are faster than their adapters."""
    return nodes == 2 and ranks > nodes and topology.link_bandwidth >= _TREE_LINK


def count_ring_steps(kind: str, ranks: int) -> float:
    """Hops that an empty message makes one after the other: round the ring, or as peers are served side by side."""
    return float(ranks - 1) if runs_on_ring(kind) else float(np.log2(ranks))


def get_node_bandwidth(kind: str, ranks: int, topology: Topology) -> float:
    """What the data sheet of the links offers to one rank, in bytes per second."""
    return topology.get_ring_bandwidth(ranks) if runs_on_ring(kind) else topology.get_all_to_all_bandwidth(ranks)


def estimate_network_seconds(
    kind: str, message: FloatArray, ranks: int, nodes: int, topology: Topology, *, span: float, rate: float
) -> FloatArray:
    """Seconds the bytes need on the busiest link when several nodes take part and links run at full rate."""
    per_node = topology.count_ranks_per_node(ranks, nodes)
    network = topology.get_network_bandwidth(per_node)
    if runs_on_ring(kind):
        bandwidth = network if per_node == 1 else min(network, span * rate)
        return message * get_bus_factor(kind, ranks) / bandwidth
    if COLLECTIVES[kind].route is Route.PAIR:
        return message / topology.get_network_bandwidth(1)
    out = message * per_node * (ranks - per_node) / ranks / network
    within = message * (per_node - 1) / ranks / rate if per_node > 1 else np.zeros_like(message)
    return np.maximum(out, within)


def _round_number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round_number(entry) for key, entry in value.items()}
    return float(f"{value:.5g}")


# HugeCTR's own: an all-reduce is divided into up to this many blocks, none smaller than 256 KiB, which go through the
# stages one behind the other (AR_NBLOCKS, AR_MIN_BLOCK)
_BLOCKS, _LEAST_BLOCK = 8.0, 2.0**18
# latencies of the network that a collective between nodes takes: the flag to the host thread and its post, the flight,
# and the flag of what has come
_FLIGHTS = 3.0


@dataclass(frozen=True, kw_only=True)
class Places:
    """Who takes part: `per_node` ranks on each of `nodes` nodes; `rate` is what one of them can send to node mates
    (bytes per second)."""

    per_node: int
    nodes: int
    rate: float


def estimate_direct_seconds(
    kind: str, message: FloatArray, places: Places, links: LinkModel, topology: Topology
) -> FloatArray:
    """Seconds of a collective of this kind, `message` bytes of every rank."""
    mates = (places.per_node - 1) / places.per_node
    inside = message * mates / places.rate
    network = links.network[name_measured_kind(kind)]
    adapter = topology.get_network_bandwidth(places.per_node) / places.per_node / network.slowdown
    floor = links.floor("all_to_all", max(2, places.per_node), topology)
    flights = _FLIGHTS * topology.network_latency if places.nodes > 1 else 0.0
    if name_measured_kind(kind) == "all_reduce":
        between = message / places.per_node / adapter if places.nodes > 1 else np.zeros_like(message)
        return floor + flights + _estimate_one_shot_seconds(message, inside, between)
    between = message * (places.nodes - 1) / places.nodes / adapter
    return floor + flights + inside + between


def _estimate_one_shot_seconds(message: FloatArray, inside: FloatArray, between: FloatArray) -> FloatArray:
    """Each GPU sums its part of the block from all node mates, switches sum it over nodes, and every GPU fetches the
    parts of its mates. One kernel does the first of all blocks, then the last."""
    blocks = np.clip(message / _LEAST_BLOCK, 1.0, _BLOCKS)
    by_links = 2.0 * inside
    by_network = between + 2.0 * inside / blocks
    behind = inside + (between + inside) / blocks
    return np.maximum(np.maximum(by_links, by_network), behind)

"""Collectives of libraries that move bytes themselves, as HugeCTR does between nodes: no NCCL, no ring.

Inside a node one kernel reads or writes the memory of node mates over the links. Between nodes host threads, one for
every GPU, see a flag of their GPU and post writes from its memory to that of other nodes; what has come sets a flag
there. Sums are made by switches on the way (SHARP).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.costs.collectives.links import LinkModel, name_measured_kind
from traincast.hardware.topology import Topology
from traincast.utils.arrays import FloatArray

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

"""How long collectives take for any number of bytes: curves of the collective model, sampled once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from traincast.costs.collectives import COLLECTIVE, load_shipped_collectives
from traincast.costs.kernels.call import Calls
from traincast.hardware.topology import Topology
from traincast.planner.sharding.task import Task
from traincast.utils.arrays import FloatArray

_GRID = np.concatenate([[0.0], 2.0 ** np.arange(3.0, 40.0, 0.125)])


class CommunicationCosts:
    """Collectives between `ranks` GPUs on `nodes` nodes."""

    def __init__(self, topology: Topology, ranks: int, nodes: int) -> None:
        self.topology, self.ranks, self.nodes = topology, ranks, nodes

    def seconds(self, kind: str, message: FloatArray) -> FloatArray:
        """Seconds from the last arrival, for messages of this many bytes (as `collectives.COLLECTIVE` counts them)."""
        if self.ranks < 2:
            return np.zeros_like(message)
        return np.asarray(np.interp(message, _GRID, _sample_curve(self.topology, kind, self.ranks, self.nodes)))


def make_task_communication(task: Task) -> tuple[CommunicationCosts, CommunicationCosts, CommunicationCosts]:
    """Collectives between all ranks of a task, those of a node, and one of each node."""
    topology, nodes = task.topology, task.nodes
    return (
        CommunicationCosts(topology, task.gpus, nodes),
        CommunicationCosts(topology, task.gpus_per_node, 1),
        CommunicationCosts(topology, nodes, nodes),
    )


@lru_cache(maxsize=256)
def _sample_curve(topology: Topology, kind: str, ranks: int, nodes: int) -> FloatArray:
    values = np.column_stack([_GRID, np.full(len(_GRID), ranks), np.full(len(_GRID), nodes)]).astype(np.float64)
    calls = Calls.from_columns(COLLECTIVE, [kind] * len(_GRID), ["fp32"] * len(_GRID), values)
    return load_shipped_collectives().predict(calls, topology).seconds


def find_busiest_bytes(received: FloatArray, gpus_per_node: int) -> FloatArray:
    """Bytes of the even all-to-all that lasts as long as one in which rank r receives `received[..., r]` in all.

    Every rank sends each rank the same, so the busiest receiver decides, or the busiest node over the network; as
    `collectives.even_bytes` counts.
    """
    ranks = received.shape[-1]
    even = received.max(axis=-1)
    nodes = -(-ranks // gpus_per_node)
    if nodes < 2:
        return np.asarray(even)
    padded = np.zeros((*received.shape[:-1], nodes * gpus_per_node))
    padded[..., :ranks] = received
    held = padded.reshape(*received.shape[:-1], nodes, gpus_per_node).sum(axis=-1)
    members = np.minimum(gpus_per_node, ranks - gpus_per_node * np.arange(nodes))
    across = held * (ranks - members) / ranks  # what comes from other nodes
    sent = held.sum(axis=-1, keepdims=True) / ranks * members - held * members / ranks  # what leaves each node
    most = np.maximum(across.max(axis=-1), sent.max(axis=-1))
    return np.asarray(np.maximum(even, most * nodes / (ranks / nodes * (nodes - 1))))

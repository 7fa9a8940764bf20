"""Collective calls: what a group of ranks is asked to exchange, and what an uneven exchange amounts to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.collective import COLLECTIVE
from traincast.ir.collectives import COLLECTIVES
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

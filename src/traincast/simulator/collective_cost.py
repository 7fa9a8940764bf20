"""How long each collective of a step takes from the moment the last rank arrives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traincast.costs.collectives import COLLECTIVE, load_shipped_collectives, share_bytes_evenly
from traincast.costs.kernels.call import Calls, Estimate
from traincast.hardware.topology import Topology
from traincast.ir.collectives import COLLECTIVES
from traincast.simulator.matched_calls import Describe, MatchedCollective
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError


def compute_collective_seconds(
    collectives: Sequence[MatchedCollective], ranks: Sequence[int], topology: Topology, describe: Describe
) -> Estimate:
    """Device time of every collective; `ranks[r]` is the program of rank r, rank r is GPU r of the cluster."""
    distinct: dict[tuple[str, str, float, int, int], int] = {}
    rows = []
    nodes_of: dict[int, tuple[list[int], int]] = {}  # by identity of the group, which calls of a communicator share
    for collective in collectives:
        if id(collective.group) not in nodes_of:
            nodes = [rank // topology.gpus_per_node for rank in collective.group]
            nodes_of[id(collective.group)] = (nodes, len(set(nodes)))
        nodes, count = nodes_of[id(collective.group)]
        size = _compute_message_bytes(collective, ranks, nodes, describe)
        key = (collective.kind, collective.compute, size, len(collective.group), count)
        rows.append(distinct.setdefault(key, len(distinct)))
    values = np.array([key[2:] for key in distinct], dtype=np.float64).reshape(len(distinct), 3)
    calls = Calls.from_columns(COLLECTIVE, [key[0] for key in distinct], [key[1] for key in distinct], values)
    estimate = load_shipped_collectives().predict(calls, topology)
    return estimate.take(np.array(rows, dtype=np.int64))


def _compute_message_bytes(
    collective: MatchedCollective, ranks: Sequence[int], nodes: Sequence[int], describe: Describe
) -> float:
    if COLLECTIVES[collective.kind].uneven_form_of:
        return share_bytes_evenly(_join_splits(collective, ranks, describe), nodes)
    sizes = {exchange.bytes for exchange in collective.exchanges}
    if len(sizes) > 1:  # only all-to-alls get here with several: even ones of different sizes
        _join_splits(collective, ranks, describe)
    return float(max(sizes))


def _join_splits(collective: MatchedCollective, ranks: Sequence[int], describe: Describe) -> FloatArray:
    """Bytes from every rank of the group to every other, as the senders say; rejected if receivers say otherwise."""
    size = len(collective.group)
    of = {part.program: i for i, part in enumerate(collective.participants)}
    place = [of[ranks[rank]] for rank in collective.group]
    even = [np.full(size, exchange.bytes // size) for exchange in collective.exchanges]
    send = [even[i] if exchange.send is None else exchange.send for i, exchange in enumerate(collective.exchanges)]
    receive = [
        even[i] if exchange.receive is None else exchange.receive for i, exchange in enumerate(collective.exchanges)
    ]
    sent, received = np.stack([send[i] for i in place]), np.stack([receive[i] for i in place])
    wrong = np.argwhere(sent != received.T)
    if len(wrong):
        source, target = wrong[0].tolist()
        participant = collective.participants[place[source]]
        raise TraincastError(
            f"rank {collective.group[source]} sends {sent[source, target]} bytes to rank {collective.group[target]}, "
            "which "
            f"expects {received[target, source]}, at {describe.call(participant.program, participant.call)}; where the "
            "program of one rank stands for others that send other sizes, capture every rank (leave out `ranks`)"
        )
    return sent.astype(np.float64)

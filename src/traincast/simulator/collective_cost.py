"""How long each collective of a step takes from the moment the last rank arrives.

Ranks draw different samples: what they send each other differs by chance, and a program that stands for several ranks
says the sizes of one of them. Sizes that agree but for that are taken at their mean, with the difference in the
uncertainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from traincast.costs.collectives import COLLECTIVE, load_shipped_collectives, share_bytes_evenly
from traincast.costs.kernels.contract import Calls, Estimate
from traincast.hardware.topology import Topology
from traincast.ir.collectives import COLLECTIVES
from traincast.simulator.collective_calls import Describe, MatchedCollective
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast.utils.errors import TraincastError

_CHANCE_SHARE, _CHANCE_ROOT = 0.1, 16.0  # of the bytes; times their root: 4 deviations of a difference of counts of 8


def compute_collective_seconds(
    collectives: Sequence[MatchedCollective], ranks: Sequence[int], topology: Topology, describe: Describe
) -> Estimate:
    """Device time of every collective; `ranks[r]` is the program of rank r, rank r is GPU r of the cluster."""
    distinct: dict[tuple[str, str, float, int, int], int] = {}
    rows, by_chance = [], []
    nodes_of: dict[int, tuple[list[int], int]] = {}  # by identity of the group, which calls of a communicator share
    for collective in collectives:
        if id(collective.group) not in nodes_of:
            nodes = [rank // topology.gpus_per_node for rank in collective.group]
            nodes_of[id(collective.group)] = (nodes, len(set(nodes)))
        nodes, count = nodes_of[id(collective.group)]
        size, differ = _compute_message_bytes(collective, ranks, nodes, describe)
        by_chance.append(differ)
        key = (collective.kind, collective.compute, size, len(collective.group), count)
        rows.append(distinct.setdefault(key, len(distinct)))
    values = np.array([key[2:] for key in distinct], dtype=np.float64).reshape(len(distinct), 3)
    calls = Calls.from_columns(COLLECTIVE, [key[0] for key in distinct], [key[1] for key in distinct], values)
    estimate = load_shipped_collectives().predict(calls, topology)
    taken = estimate.take(np.array(rows, dtype=np.int64))
    return replace(taken, sigma=np.hypot(taken.sigma, by_chance))


def _compute_message_bytes(
    collective: MatchedCollective, ranks: Sequence[int], nodes: Sequence[int], describe: Describe
) -> tuple[float, float]:
    """Bytes of the message, and by which share of them ranks disagree."""
    if COLLECTIVES[collective.kind].uneven_form_of:
        splits, differ = _join_splits(collective, ranks, describe)
        return share_bytes_evenly(splits, nodes), differ
    sizes = {exchange.bytes for exchange in collective.exchanges}
    if len(sizes) > 1:  # only all-to-alls get here with several: even ones of different sizes
        return float(max(sizes)), _join_splits(collective, ranks, describe)[1]
    return float(max(sizes)), 0.0


def _join_splits(collective: MatchedCollective, ranks: Sequence[int], describe: Describe) -> tuple[FloatArray, float]:
    """Bytes from every rank of the group to every other, and the share by which senders and receivers disagree;
    rejected where that is more than chance."""
    size = len(collective.group)
    of = {part.program: i for i, part in enumerate(collective.participants)}
    place = [of[ranks[rank]] for rank in collective.group]
    even = [np.full(size, exchange.bytes // size) for exchange in collective.exchanges]
    send = [even[i] if exchange.send is None else exchange.send for i, exchange in enumerate(collective.exchanges)]
    receive = [
        even[i] if exchange.receive is None else exchange.receive for i, exchange in enumerate(collective.exchanges)
    ]
    sent, received = np.stack([send[i] for i in place]), np.stack([receive[i] for i in place])
    wrong = np.argwhere(~_agree_but_for_chance(sent, received.T))
    if len(wrong):
        source, target = wrong[0].tolist()
        participant = collective.participants[place[source]]
        raise TraincastError(
            f"rank {collective.group[source]} sends {sent[source, target]} bytes to rank {collective.group[target]}, "
            f"which expects {received[target, source]}, at {describe.call(participant.program, participant.call)}; "
            "that is more than samples drawn at random differ by: capture every rank whose share of the work is "
            "another (leave out `ranks`)"
        )
    mean = (sent + received.T) / 2
    return mean, float(np.abs(sent - received.T).max() / max(1.0, mean.max()))


def _agree_but_for_chance(sent: IntArray, received: IntArray) -> BoolArray:
    """Whether numbers of bytes are those of samples of one distribution: within a tenth, or four standard deviations
    of counts of 8-byte ids."""
    larger = np.maximum(sent, received).astype(np.float64)
    close: BoolArray = np.abs(sent - received) <= _CHANCE_SHARE * larger + _CHANCE_ROOT * np.sqrt(larger)
    return close

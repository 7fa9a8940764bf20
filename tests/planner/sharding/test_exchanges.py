from __future__ import annotations

import numpy as np
import pytest

from traincast.costs.collectives import COLLECTIVE, load_shipped_collectives
from traincast.costs.kernels.contract import Calls
from traincast.hardware.platform import load_platform
from traincast.planner.sharding.durations import CommunicationCosts, find_busiest_bytes, make_task_communication

TOPOLOGY = load_platform("dgx-a100").topology


def _model(kind, nbytes, ranks, nodes):
    calls = Calls.from_columns(COLLECTIVE, [kind], ["fp32"], np.array([[nbytes, ranks, nodes]], dtype=float))
    return float(load_shipped_collectives().predict(calls, TOPOLOGY).seconds[0])


@pytest.mark.parametrize("kind", ["all_to_all", "all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (16, 2)])
def test_curves_follow_the_collective_model(kind, ranks, nodes):
    exchanges = CommunicationCosts(TOPOLOGY, ranks, nodes)
    for nbytes in (8.0, 1000.0, 123_456.0, 7.7e6, 3.3e8):
        seconds = exchanges.seconds(kind, np.array([nbytes]))
        assert seconds[0] == pytest.approx(_model(kind, nbytes, ranks, nodes), rel=0.02)


def test_one_rank_exchanges_nothing():
    assert CommunicationCosts(TOPOLOGY, 1, 1).seconds("all_reduce", np.array([[1e9], [0.0]])).tolist() == [[0.0], [0.0]]


def test_more_bytes_never_take_less():
    message = np.linspace(0.0, 1e8, 500)
    seconds = CommunicationCosts(TOPOLOGY, 8, 1).seconds("all_to_all", message)
    assert (np.diff(seconds) >= 0.0).all()


def test_a_task_has_exchanges_between_all_within_a_node_and_across(two_nodes_task):
    world, within, across = make_task_communication(two_nodes_task)
    assert [(each.ranks, each.nodes) for each in (world, within, across)] == [(16, 2), (8, 1), (2, 2)]


def test_an_even_exchange_is_itself_whatever_the_nodes():
    received = np.full((3, 16), 5.0)
    for gpus_per_node in (4, 8, 16):
        assert find_busiest_bytes(received, gpus_per_node).tolist() == [5.0, 5.0, 5.0]


def test_within_a_node_the_busiest_receiver_decides():
    assert find_busiest_bytes(np.array([1.0, 7.0, 3.0]), 8) == 7.0


def test_a_node_that_receives_most_over_the_network_decides():
    received = np.where(np.arange(16) < 8, 30.0, 1.0)
    # the first node gets half of its 240 from the other: as much as an even exchange of 30 per rank
    assert find_busiest_bytes(received, 8) == pytest.approx(30.0)


def test_a_last_node_that_is_not_full_counts_its_own_ranks():
    received = np.array([0.0, 0.0, 0.0, 0.0, 12.0, 12.0])
    # four of six senders are elsewhere: 16 of 24 bytes come over the network
    assert find_busiest_bytes(received, 4) == pytest.approx(max(12.0, 16.0 * 2 / (6 / 2 * 1)))


def test_plans_are_judged_one_by_one():
    received = np.random.default_rng(0).uniform(0, 10, size=(5, 16))
    alone = [float(find_busiest_bytes(row, 8)) for row in received]
    assert find_busiest_bytes(received, 8).tolist() == pytest.approx(alone)

"""Collectives from links alone, with coefficients and topologies that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traincast.costs.collectives.links import (
    FLAGS_SLOWDOWN,
    LinkModel,
    NetworkCoefficients,
    NodeCoefficients,
    count_ring_steps,
    estimate_network_seconds,
    get_bus_factor,
    get_node_bandwidth,
)
from traincast.hardware.topology import Topology

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MODEL = LinkModel(
    node={kind: NodeCoefficients(launch=5e-6, hops=1.0, ramp=0.0, slowdown=1.25) for kind in KINDS},
    network={kind: NetworkCoefficients(hops=1.0, slowdown=2.0, span=0.5) for kind in KINDS},
    sigma=0.2,
    network_sigma=0.3,
)
# four GPUs behind a switch at 100 GB/s, two adapters of 10 GB/s, hops of 1 and 5 us
NODE = Topology(
    key="made-up", gpus_per_node=4, island=4, link_bandwidth=100e9, host_bandwidth=30e9, adapters=2,
    adapter_bandwidth=10e9, link_latency=1e-6, network_latency=5e-6,
)  # fmt: skip


def size(value):
    return np.array([float(value)])


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("send_recv", 1.0)],
)
def test_the_busiest_link_carries_so_much_of_a_message_of_four_ranks(kind, factor):
    assert get_bus_factor(kind, 4) == pytest.approx(factor)


def test_an_empty_message_goes_round_the_ring_or_is_served_side_by_side():
    assert [count_ring_steps("all_reduce", ranks) for ranks in (2, 4, 8)] == [1, 3, 7]
    assert [count_ring_steps("all_to_all", ranks) for ranks in (2, 4, 8)] == [1, 2, 3]
    assert MODEL.floor("all_reduce", 4, NODE) == pytest.approx(5e-6 + 3e-6)


def test_inside_a_node_a_message_takes_the_floor_and_its_bytes_over_the_links():
    # 1 GB of four ranks: 1.5 GB over 100 GB/s, 1.25 times
    assert MODEL.inside("all_reduce", size(1e9), 4, NODE)[0] == pytest.approx(8e-6 + 1.25 * 15e-3)
    assert MODEL.node_rate("all_reduce", 4, NODE) == pytest.approx(80e9)


def test_a_ramp_goes_with_the_root_of_the_time_on_the_links():
    ramped = replace(MODEL, node={"all_reduce": NodeCoefficients(launch=0.0, hops=0.0, ramp=1e-3, slowdown=0.0)})
    assert ramped.inside("all_reduce", size(1e9), 4, NODE)[0] == pytest.approx(1e-3 * 15e-3**0.5)


def test_cards_without_fast_links_talk_over_the_host():
    pairs = replace(NODE, island=2)
    assert get_node_bandwidth("all_reduce", 2, pairs) == 100e9
    assert get_node_bandwidth("all_reduce", 4, pairs) == 30e9


def test_a_ring_over_nodes_is_as_slow_as_its_slowest_part():
    # both adapters of a node: 20 GB/s; half of the 30 GB/s inside: 15 GB/s
    both = estimate_network_seconds("all_gather", size(1e9), 8, 2, NODE, span=0.5, rate=100e9)
    inside = estimate_network_seconds("all_gather", size(1e9), 8, 2, NODE, span=0.5, rate=30e9)
    assert both[0] == pytest.approx(0.875e9 / 20e9)
    assert inside[0] == pytest.approx(0.875e9 / 15e9)


def test_an_all_to_all_over_nodes_waits_for_what_leaves_a_node():
    # each of four ranks sends half of its 1 GB to the other node: 2 GB over 20 GB/s
    assert estimate_network_seconds("all_to_all", size(1e9), 8, 2, NODE, span=1.0, rate=80e9)[0] == pytest.approx(0.1)


def test_a_message_between_two_gpus_has_one_adapter():
    def seconds(node):
        return estimate_network_seconds("send_recv", size(1e9), 2, 2, node, span=1.0, rate=80e9)[0]

    assert seconds(replace(NODE, shared=False)) == pytest.approx(0.1)
    assert seconds(NODE) == pytest.approx(0.2)  # in a step all four GPUs send over two adapters


def test_small_messages_over_many_nodes_take_a_tree_and_large_ones_the_ring():
    def seconds(kind, message):
        return MODEL.across(kind, size(message), 64, 16, NODE, floor=10e-6, rate=80e9)[0]

    small, large = seconds("all_reduce", 8), seconds("all_reduce", 1e9)
    x = 1e9 * get_bus_factor("all_reduce", 64) / 20e9
    assert small == pytest.approx(10e-6 + 5e-6 * 2 * 4, rel=1e-3), "log2 of 16 nodes, there and back"
    assert large == pytest.approx(10e-6 + 63 * 5e-6 + 2.0 * x)
    assert FLAGS_SLOWDOWN * x > x


def test_two_nodes_with_fast_links_send_a_sum_over_the_network_once():
    fast = replace(NODE, link_bandwidth=450e9)

    def seconds(topology, ranks=8, nodes=2, rate=300e9):
        return MODEL.across("all_reduce", size(1e9), ranks, nodes, topology, floor=10e-6, rate=rate)[0]

    def once(bandwidth):
        return 10e-6 + (np.sqrt(2.0 * 1e9 / bandwidth) + np.sqrt(1.7 * 2 * 5e-6)) ** 2

    assert seconds(fast) == pytest.approx(once(20e9))
    assert seconds(fast, rate=30e9) == pytest.approx(once(15e9)), "up and down the links of a node"
    assert seconds(NODE) == pytest.approx(10e-6 + 7 * 5e-6 + 2.0 * 1.75 * 1e9 / 20e9), "slower links: a ring"
    assert seconds(fast, ranks=16, nodes=4) == pytest.approx(10e-6 + 15 * 5e-6 + 2.0 * 1.875 * 1e9 / 20e9)
    assert seconds(fast, ranks=2) == pytest.approx(10e-6 + 5e-6 + 2.0 * 1e9 / 5e9), "one GPU of each"


def test_a_short_gather_pays_the_network_as_often_as_it_changes_nodes():
    def seconds(message):
        return MODEL.across("all_gather", size(message), 64, 16, NODE, floor=10e-6, rate=80e9)[0]

    mates = MODEL.node["all_gather"].hops * NODE.link_latency * 48
    assert seconds(8) == pytest.approx(10e-6 + 15 * 5e-6 + mates, rel=1e-3)
    x = 1e9 * get_bus_factor("all_gather", 64) / 20e9
    assert seconds(1e9) == pytest.approx(10e-6 + 63 * 5e-6 + 2.0 * x), "all ranks step together"
    sizes = 2.0 ** np.arange(3, 30)
    assert np.all(np.diff([seconds(one) for one in sizes]) >= 0.0)


def test_the_model_survives_being_written_down():
    assert LinkModel.from_json(MODEL.to_json()) == MODEL

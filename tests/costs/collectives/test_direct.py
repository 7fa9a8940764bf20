"""Exchanges without NCCL: kernels over links, writes between nodes, blocks one behind the other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.costs.collectives.test_model import calls
from traincast.costs.collectives import load_shipped_collectives
from traincast.costs.collectives.links import Places, estimate_direct_seconds
from traincast.hardware import load_topology

LINKS, NODE = load_shipped_collectives().links, load_topology("dgx-a100")
EIGHT = Places(per_node=8, nodes=8, rate=250e9)
FLOOR = LINKS.floor("all_to_all", 8, NODE)


def seconds(kind, size, places=EIGHT):
    return float(estimate_direct_seconds(kind, np.array([float(size)]), places, LINKS, NODE)[0])


def test_an_empty_exchange_takes_its_kernel_and_three_latencies_of_the_network():
    for kind in ("one_shot_all_reduce", "node_first_all_to_all"):
        assert seconds(kind, 0) == pytest.approx(FLOOR + 15e-6)
        assert seconds(kind, 0, Places(per_node=8, nodes=1, rate=250e9)) == pytest.approx(FLOOR)


def test_rows_cross_the_links_of_a_node_and_then_one_adapter_per_gpu():
    inside = 8e6 * 7 / 8 / 250e9
    between = 8e6 * 7 / 8 / (25e9 / LINKS.network["all_to_all"].slowdown)
    assert seconds("node_first_all_to_all", 8e6) == pytest.approx(FLOOR + 15e-6 + inside + between)


def test_the_blocks_of_a_sum_go_one_behind_the_other():
    # an eighth of the bytes goes over each adapter; links work on the first and the last of eight blocks alone
    inside = 64e6 * 7 / 8 / 250e9
    between = 64e6 / 8 / (25e9 / LINKS.network["all_reduce"].slowdown)
    assert seconds("one_shot_all_reduce", 64e6) == pytest.approx(FLOOR + 15e-6 + max(2 * inside, between + inside / 4))


def test_a_sum_of_one_block_goes_through_one_stage_after_the_other():
    size = 2**18
    inside = size * 7 / 8 / 250e9
    between = size / 8 / (25e9 / LINKS.network["all_reduce"].slowdown)
    assert seconds("one_shot_all_reduce", size) == pytest.approx(FLOOR + 15e-6 + 2 * inside + between)


def test_on_one_node_a_sum_is_read_and_fetched_over_the_links():
    one = Places(per_node=8, nodes=1, rate=250e9)
    assert seconds("one_shot_all_reduce", 64e6, one) == pytest.approx(FLOOR + 2 * 64e6 * 7 / 8 / 250e9)


@pytest.mark.parametrize("kind", ["one_shot_all_reduce", "node_first_all_to_all"])
def test_they_are_faster_than_nccl_where_messages_are_small(kind):
    like = "all_reduce" if "reduce" in kind else "all_to_all"
    model = load_shipped_collectives()
    own, nccl = (model.predict(calls(name, 1e6, 64, 8, "fp16"), NODE).seconds[0] for name in (kind, like))
    assert 10e-6 < own < nccl

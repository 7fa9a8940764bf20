"""What joins several GPUs when only the GPU was named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traincast.hardware import load_platform, load_topology
from traincast.hardware.platform import add_default_links, list_device_keys
from traincast.utils.errors import TraincastError


def test_a_node_keeps_its_links():
    platform = load_platform("dgx1-v100")
    assert add_default_links(platform) is platform


def test_a_device_takes_those_of_the_node_it_is_usual_in():
    platform = add_default_links(load_platform("a100-80gb"))
    assert platform.topology == load_topology("dgx-a100")
    assert (platform.device.key, platform.gpus_per_node) == ("a100-80gb", 8)
    assert "dgx-a100" in platform.assumed


def test_a_card_without_a_node_goes_eight_to_a_server():
    platform = add_default_links(load_platform("quadro-rtx-8000"))
    assert platform.topology is not None
    # its NVLink (100 GB/s) is a bridge that a server may lack
    assert (platform.topology.island, platform.topology.link_bandwidth) == (1, 16e9)
    assert "PCIe 3" in platform.assumed


def test_a_fast_fabric_joins_the_whole_server():
    platform = load_platform("mi300x")
    platform = add_default_links(replace(platform, device=replace(platform.device, node="")))
    assert platform.topology is not None
    assert (platform.topology.island, platform.topology.link_bandwidth) == (8, 448e9)
    assert "its own links" in platform.assumed


def test_each_amd_gpu_has_a_link_to_each_other_one():
    topology = add_default_links(load_platform("mi300x")).topology
    assert topology == load_topology("mi300x-platform")
    # one link of 64 GB/s between two, three of a GPU among four, all seven among eight
    assert [topology.get_ring_bandwidth(n) for n in (2, 4, 8)] == [64e9, 192e9, 448e9]
    assert topology.get_all_to_all_bandwidth(8) == 448e9


@pytest.mark.parametrize("key", list_device_keys())
def test_every_device_has_links(key):
    platform = add_default_links(load_platform(key))
    assert platform.topology is not None
    assert platform.topology.count_nodes(17) == -(-17 // platform.gpus_per_node)
    assert key in platform.assumed


def test_an_unknown_node_is_named():
    platform = load_platform("a100-80gb")
    wrong = replace(platform, device=replace(platform.device, node="dgx-a1000"))
    with pytest.raises(TraincastError, match="dgx-a1000"):
        add_default_links(wrong)

"""Topologies as data: what the node files and a user's own file say about links."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.resources import files

import pytest

from traincast.hardware import load_platform, load_topology
from traincast.hardware.platform import list_node_keys
from traincast.hardware.topology import compute_all_to_all_load, count_rings, is_connected
from traincast.utils.errors import TraincastError


@pytest.mark.parametrize("key", list_node_keys())
def test_every_node_file_has_a_topology_with_its_figures(key):
    topology, platform = load_topology(key), load_platform(key)
    table = tomllib.loads((files("traincast.hardware") / "data" / "nodes" / f"{key}.toml").read_text())
    assert topology.gpus_per_node == platform.gpus_per_node == table["gpus_per_node"]
    assert topology.link_bandwidth == pytest.approx(1e9 * table["link_gbs"])
    assert topology.get_network_bandwidth(topology.gpus_per_node) == pytest.approx(
        1e9 * table["network_gbs_per_gpu"] * platform.gpus_per_node
    )


def test_sixteen_gpus_of_an_eight_gpu_node_are_two_nodes():
    topology = load_topology("dgx-a100")
    assert [topology.count_nodes(gpus) for gpus in (1, 8, 9, 16, 1024)] == [1, 1, 2, 2, 128]
    with pytest.raises(TraincastError, match="cannot use 0 GPUs"):
        topology.count_nodes(0)


def test_the_cube_mesh_offers_as_many_rings_as_were_measured():
    # all-reduce of V100 GPUs 0..n-1 was measured at 22.5, 45, 85, 37, 46, 87 and 134 GB/s bus bandwidth
    topology = load_topology("dgx1-v100")
    assert [topology.get_ring_bandwidth(n) / 1e9 for n in range(2, 9)] == [25, 50, 100, 40, 50, 100, 150]


def test_without_relays_strangers_of_a_cube_mesh_talk_through_host_memory():
    topology = load_topology("dgx1-v100")
    older = replace(topology, relays=False)
    assert older.get_all_to_all_bandwidth(4) == topology.get_all_to_all_bandwidth(4)  # all four are neighbours
    # three of seven peers have no link; two GPUs share 16 GB/s of PCIe, of which 85 % is reached
    assert older.get_all_to_all_bandwidth(8) == pytest.approx(7 / 3 * 0.85 * 16e9 / 2)
    assert topology.get_all_to_all_bandwidth(8) > 2 * older.get_all_to_all_bandwidth(8)


def test_all_to_all_over_a_mesh_is_held_back_by_its_thinnest_pair():
    topology = load_topology("dgx1-v100")
    assert topology.get_all_to_all_bandwidth(4) == pytest.approx(75e9)  # three peers over single links of 25 GB/s
    assert topology.get_all_to_all_bandwidth(8) < topology.get_all_to_all_bandwidth(
        4
    )  # most pairs need a hop in between


def test_rings_and_reach_of_small_meshes():
    line = ((0, 1, 1), (1, 2, 1))
    assert count_rings(line, 3) == 0
    assert is_connected(line, 3)
    assert not is_connected(line, 4)
    assert compute_all_to_all_load(line, 3) == 2.0
    assert compute_all_to_all_load(((0, 1, 1),), 3) == float("inf")


def test_cards_in_pairs_talk_over_the_host_beyond_their_bridge():
    topology = load_topology("pcie-a100-pairs")
    assert topology.get_ring_bandwidth(2) == 300e9
    assert topology.get_ring_bandwidth(4) == 32e9
    assert 32e9 < topology.get_all_to_all_bandwidth(4) < 300e9


def test_rings_over_links_between_all_use_every_wire():
    def mesh(gpus, wires):
        return tuple((a, b, wires) for a in range(gpus) for b in range(a + 1, gpus))

    # as measured on two, four and eight GPUs that are all joined to each other
    assert [count_rings(mesh(8, 1), n) for n in (2, 3, 4, 5, 6, 7, 8)] == [1, 2, 3, 4, 5, 6, 7]
    assert count_rings(mesh(8, 2), 8) == 14


def test_a_domain_of_72_is_one_node():
    topology = load_topology("gb200-nvl72")
    assert [topology.count_nodes(n) for n in (4, 72, 73, 144)] == [1, 1, 2, 2]
    assert topology.get_ring_bandwidth(72) == topology.get_all_to_all_bandwidth(72) == 900e9


def test_without_peer_access_every_gpu_more_costs_all_of_them():
    peers, host = load_topology("pcie-l40s"), load_topology("pcie-l40s-no-peer")
    assert [peers.get_ring_bandwidth(n) for n in (2, 4, 8)] == [32e9, 32e9, 32e9]
    assert [host.get_ring_bandwidth(n) for n in (2, 4, 8)] == [32e9, 8e9, 2e9]
    assert host.get_all_to_all_bandwidth(8) == 2e9


def test_gpus_behind_one_pcie_switch_share_the_way_out():
    topology = replace(load_topology("pcie-a100"), gpus_per_host_link=4)
    # among four behind one switch every GPU has its own link; of eight, each sends 4/7 through a quarter of one
    assert [topology.get_all_to_all_bandwidth(n) for n in (2, 4, 8)] == [32e9, 32e9, 14e9]
    assert replace(topology, gpus_per_host_link=2).get_all_to_all_bandwidth(4) == 24e9
    assert topology.get_ring_bandwidth(8) == 32e9  # a ring leaves a switch once
    assert (
        replace(topology, peer_access=False).get_all_to_all_bandwidth(8) == 2e9
    )  # the rate through host memory has it
    assert load_topology("dgx-a100").get_all_to_all_bandwidth(8) == 300e9  # NVLink does not care
    pairs = replace(load_topology("pcie-a100-pairs"), gpus_per_host_link=2)
    assert pairs.get_all_to_all_bandwidth(4) == 24e9  # two thirds go beyond the bridge, through half a link


def test_gpus_of_a_step_share_their_links_to_the_host():
    dgx = load_platform("dgx-a100")
    assert [dgx.get_device_when_sharing(n).host_sharers for n in (1, 2, 8, 64)] == [1, 2, 2, 2]
    assert dgx.get_device_when_sharing(1) is dgx.device
    assert load_platform("dgx-h100").get_device_when_sharing(8).host_sharers == 1
    assert load_platform("a100-80gb").get_device_when_sharing(8).host_sharers == 1  # nothing is known of its node
    assert load_platform("dgx1-v100").get_device_when_sharing(8).host_sharers == 2


def test_a_bridge_is_fast_even_without_peer_access(tmp_path):
    path = tmp_path / "pairs.yaml"
    path.write_text(
        "device: h100-nvl\ngpus_per_node: 8\nisland: 2\nlink_gbs: 300\nnetwork_gbs_per_gpu: 25\npeer_access: false\n"
    )
    topology = load_topology(str(path))
    assert topology.get_ring_bandwidth(2) == 300e9
    assert topology.get_ring_bandwidth(4) == 16e9  # PCIe 5 through the host, a quarter of it


def test_a_user_describes_a_cluster_in_yaml(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(
        "device: h100\ngpus_per_node: 4\nlink_gbs: 450\nnetwork_gbs_per_gpu: 25\nadapters: 2\nnetwork_latency_us: 8\n"
    )
    topology = load_topology(str(path))
    assert (topology.key, topology.gpus_per_node, topology.adapters) == ("ours", 4, 2)
    assert topology.get_network_bandwidth(1) == 25e9  # all four GPUs communicate at once over two adapters
    assert replace(topology, shared=False).get_network_bandwidth(1) == 50e9  # alone, one has a whole adapter
    assert topology.get_network_bandwidth(4) == 100e9
    assert topology.network_latency == pytest.approx(8e-6)
    assert topology.host_bandwidth == 64e9  # PCIe 5 of the device
    assert topology.curves == ""
    assert load_platform(str(path)).device.key == "h100"


GOOD = "gpus_per_node: 8\nlink_gbs: 100\nnetwork_gbs_per_gpu: 10\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("link_gbs: 100\nnetwork_gbs_per_gpu: 10\n", "'gpus_per_node'"),
        (GOOD + "adapters: 0\n", "'adapters'"),
        (GOOD + "island: 1.5\n", "integer for 'island'"),
        (GOOD + "link_latency_us: .nan\n", "'link_latency_us'"),
        (GOOD + "link_latency_us: .inf\n", "'link_latency_us' is inf"),
        (GOOD.replace("100", "100000"), "'link_gbs' is 100000, which no node has .*; check its unit"),
        (GOOD.replace(" 10\n", " 0.001\n"), "'network_gbs_per_gpu' is 0.001"),
        (GOOD + "link_latency_us: 1500\n", "'link_latency_us' is 1500"),
        (GOOD + "peer_access: 'no'\n", "'peer_access' is 'no'; give true or false"),
        (GOOD + "gpus_per_host_link: 0\n", "'gpus_per_host_link'"),
        (GOOD + "gpus_per_host_link: 1.5\n", "integer for 'gpus_per_host_link'"),
        (GOOD + "links: 3\n", "list of"),
        (GOOD + "links: [[0, 9, 1]]\n", "two GPUs below 8"),
        (GOOD + "links: [[0, 1, true]]\n", "is not"),
        (GOOD + "links: [[0, 1, 1], [1, 0, 1]]\n", "twice"),
        ("gpus_per_node: 16\nlink_gbs: 1\nnetwork_gbs_per_gpu: 1\nlinks: [[0, 1, 1]]\n", "at most 8 GPUs"),
        ("- 1\n", "key: value"),
        ("a: [\n", "not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_a_wrong_description_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(TraincastError, match=message):
        load_topology(str(path))


MEASURED = "device: h100\ngpus_per_node: 4\nlink_gbs: 450\nnetwork_gbs_per_gpu: 25\ncurves: h100\n"


@pytest.mark.parametrize("curves", ["h100", "h100@2.29.2", "h100+cluster01"])
@pytest.mark.parametrize("load", [load_platform, load_topology])
def test_curves_measured_on_other_links_are_refused(tmp_path, load, curves):
    path = tmp_path / "ours.yaml"
    path.write_text(MEASURED.replace("curves: h100", f"curves: {curves}").replace("450", "3"))
    with pytest.raises(TraincastError, match=r"'link_gbs' is not that of dgx-h100, .*; leave out 'curves'"):
        load(str(path))


@pytest.mark.parametrize("field", ["link_latency_us: 9", "island: 2", "links: [[0, 1, 2], [2, 3, 2]]"])
def test_every_figure_that_curves_would_hide_is_refused(tmp_path, field):
    path = tmp_path / "ours.yaml"
    path.write_text(MEASURED + field + "\n")
    with pytest.raises(TraincastError, match=f"'{field.split(':')[0]}' is not that of dgx-h100"):
        load_topology(str(path))


def test_curves_hold_for_a_node_of_the_same_links(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(MEASURED)
    assert load_topology(str(path)).curves == "h100"


def test_unknown_names_and_single_gpus_are_refused():
    with pytest.raises(TraincastError, match="dgx-a100"):
        load_topology("dgx-a10")
    with pytest.raises(TraincastError, match="is one GPU"):
        load_topology("h100")
    with pytest.raises(TraincastError, match="does not exist"):
        load_topology("nowhere.toml")


def test_geforce_cards_send_no_more_through_host_memory_than_it_takes():
    assert load_platform("rtx-3090").device.node == "pcie-geforce"
    topology = load_topology("pcie-geforce")
    assert [topology.get_ring_bandwidth(ranks) for ranks in (2, 4, 8)] == [6e9, 6e9, 6e9]


def test_ranks_fill_one_node_after_the_other():
    node = load_topology("dgx-h100")
    places = {(12, 2): 8, (16, 2): 8, (10, 10): 1, (20, 10): 2, (6, 2): 4, (3, 3): 1}
    assert {place: node.count_ranks_per_node(*place) for place in places} == places

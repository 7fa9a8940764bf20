"""The machine that a published row names."""

from __future__ import annotations

import pytest

from tests.evaluation.suites.folders import MLPERF
from traincast.hardware.platform import load_topology
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.machines import find_named_device, fit_node, load_node_of_size, read_machine
from traincast_evaluation.suites.published import Row


def row(**changes):
    return Row("mlperf_dlrm.csv", 3, {**MLPERF, **changes})


@pytest.mark.parametrize(
    ("text", "device", "node"),
    [
        ("NVIDIA A100", "a100-40gb", "dgx-a100"),
        ("NVIDIA A100-SXM4-80GB (400W)", "a100-80gb", "dgx-a100"),
        ("NVIDIA A100-PCIe-40GB (250W)", "a100-40gb-pcie", "pcie-a100"),
        ("NVIDIA H100-SXM5-80GB", "h100", "dgx-h100"),
        ("NVIDIA H200-SXM5-141GB", "h200", "hgx-h200"),
        ("NVIDIA B200-SXM-180GB", "b200", "hgx-b200"),
    ],
)
def test_an_accelerator_is_a_device_in_the_node_it_is_sold_in(text, device, node):
    machine = read_machine(row(accelerator=text))
    assert (machine.device.key, machine.key) == (device, node)


def test_pcie_systems_of_the_first_hugectr_round_had_no_peer_access():
    text = "NVIDIA A100-PCIe-40GB (250W)"
    assert read_machine(row(accelerator=text, mlperf_round="v1.0")).key == "pcie-a100-no-peer"
    assert read_machine(row(accelerator="NVIDIA A100-SXM4-80GB", mlperf_round="v1.0")).key == "dgx-a100"


def test_a_node_has_as_many_gpus_as_the_row_says():
    machine = read_machine(row(accelerator="NVIDIA H100-SXM5-80GB", gpus_per_node="4", num_nodes="2"))
    assert (machine.gpus_per_node, machine.topology.gpus_per_node, machine.topology.island) == (4, 4, 4)
    assert load_node_of_size("pcie-a100", "a100-80gb-pcie", 4).topology.island == 1


@pytest.mark.parametrize("text", ["Habana Gaudi2", "", "NVIDIA A100-SXM4-60GB"])
def test_what_is_not_built_in_is_named(text):
    with pytest.raises(
        TraincastError, match=r"unknown accelerator .*'mlperf_dlrm.csv', row 3; known are A100 PCI 40GB"
    ):
        read_machine(row(accelerator=text))


def test_gpus_that_do_not_add_up_are_refused():
    with pytest.raises(TraincastError, match="2 nodes of 8 GPUs are not 8 GPUs"):
        read_machine(row(num_nodes="2"))


def test_other_boards_are_found_by_the_words_of_their_names() -> None:
    named = {"NVIDIA H100-SXM5-64GB": "h100", "Tesla V100-SXM2-32GB": "v100-32gb", "L40S (48 GB)": "l40s", "A30": "a30"}
    assert {text: find_named_device(text) for text in named} == named
    assert find_named_device("TPU v5p") == find_named_device("") == ""


def test_a_smaller_node_keeps_its_adapters_per_gpu_and_a_rack_stays_whole() -> None:
    half = fit_node(load_topology("dgx-h100"), 4)
    assert (half.gpus_per_node, half.island, half.adapters) == (4, 4, 4)
    assert fit_node(load_topology("gb200-nvl72"), 4) == load_topology("gb200-nvl72")

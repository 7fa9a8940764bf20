"""A user's own data sheet: read when it is right, rejected by the field that is wrong."""

from __future__ import annotations

import pytest

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.families import load_shipped_model
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast.hardware import load_device, load_platform
from traincast.utils.errors import TraincastError

SHEET = """
name = "My GPU"
arch = "ampere"
memory_gb = 24
dram_bandwidth_gbs = 600
num_sms = 72
cores_per_sm = 128
boost_clock_mhz = 1695
l2_mb = 6
smem_kb_per_sm = 100
nvlink_gbs = 0
pcie_gen = 4

[peak_tflops]
fp32 = 31.2
bf16 = 125
"""


def sheet(folder, old="", new="", name="mine"):
    path = folder / f"{name}.toml"
    assert old in SHEET
    path.write_text(SHEET.replace(old, new, 1) if old else SHEET)
    return str(path)


def test_a_sheet_is_enough_for_a_prediction_with_a_wider_interval(tmp_path):
    device = load_platform(sheet(tmp_path)).device
    assert device.vendor == "nvidia"
    product = GEMM.call("mm", batch=1, m=4096, n=4096, k=4096, trans_a=0, trans_b=1, bias=0)
    adding = ELEMENTWISE.call("add", elements=1e8, bytes_read=8e8, bytes_written=4e8, tensors=3)
    for call in (product, adding):
        calls = Calls.of(call.family, [call])
        mine, known = (
            load_shipped_model(call.family.name).predict(calls, d) for d in (device, load_device("v100-pcie"))
        )
        assert not mine.in_domain[0]
        assert mine.sigma[0] > known.sigma[0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("l2_mb", "l2_mib", ["'l2_mib'", "l2_mb"]),
        ("pcie_gen = 4", "pcie_gen = 4\nsustained_clock = 1500", ["'sustained_clock'", "sustained_clock_mhz"]),
        ("bf16", "bf61", ["'bf61'", "bf16"]),
        ("ampere", "ampare", ["'ampare'", "ampere"]),
        ('arch = "ampere"', "", ["'arch'", "ampere"]),
        ('arch = "ampere"', 'arch = ["ampere"]', ["arch"]),
        ('arch = "ampere"', 'arch = "ampere"\nvendor = "amd"', ["'vendor'", "nvidia"]),
        ('arch = "ampere"', 'arch = "next"\nvendor = "nvidia"', ["'compute_capability'"]),
        ('arch = "ampere"', 'arch = "next"\nvendor = "intel"', ["'intel'", "nvidia"]),
        ('arch = "ampere"', 'arch = "ampere"\ncompute_capability = 86', ["'compute_capability'", "unit"]),
        ("= 600", "= 600e9", ["'dram_bandwidth_gbs'", "unit"]),
        ("= 600", "= 0.6", ["'dram_bandwidth_gbs'", "unit"]),
        ("= 600", "= nan", ["'dram_bandwidth_gbs'"]),
        ("= 600", "= 1" + "0" * 400, ["'dram_bandwidth_gbs'"]),
        ("= 24", "= 24_000_000_000", ["'memory_gb'", "unit"]),
        ("= 1695", "= 1.695", ["'boost_clock_mhz'", "unit"]),
        ("fp32 = 31.2", "fp32 = 31200", ["'fp32'", "31.2", "unit"]),
        ("fp32 = 31.2", "fp32 = 3.1", ["'fp32'", "31.2"]),
        ("bf16 = 125", "bf16 = 0.125", ["'bf16'", "0.125 TFLOPS", "give peaks in TFLOPS"]),
        ("bf16 = 125", "bf16 = 125\nfp16 = 0.312", ["'fp16'", "give peaks in TFLOPS"]),
        ("bf16 = 125", "bf16 = 12500", ["'bf16'", "401 times"]),
        ("bf16 = 125", "bf16 = 125e12", ["'bf16'", "unit"]),
        ("pcie_gen = 4", "pcie_gen = 40", ["'pcie_gen'"]),
        ("pcie_gen = 4", "pcie_gen = 4\nsustained_clock_mhz = 1800", ["'sustained_clock_mhz'", "boost_clock_mhz"]),
        ("pcie_gen = 4", "pcie_gen = 4\nloaded_clock_mhz = 1800", ["'loaded_clock_mhz'", "boost_clock_mhz"]),
        ("pcie_gen = 4", "pcie_gen = 4\nloaded_clock_mhz = 1.2", ["'loaded_clock_mhz'", "unit"]),
        ("bf16 = 125", "bf16 = 125\nfp4 = 50000", ["'fp4'", "give peaks in TFLOPS"]),
        ("num_sms = 72", "num_sms = 72.5", ["'num_sms'", "integer"]),
    ],
)
def test_a_wrong_sheet_is_refused_by_the_name_of_its_field(tmp_path, old, new, words):
    with pytest.raises(TraincastError) as caught:
        load_platform(sheet(tmp_path, old, new))
    message = str(caught.value)
    assert "\n" not in message
    for word in ["mine", *words]:
        assert word in message


def test_a_node_with_a_misspelt_field_is_refused(tmp_path):
    path = tmp_path / "node.yaml"
    path.write_text("device: a100-80gb\ngpus_per_node: 4\nlink_gbs: 300\nnetwork_gbs_per_gpu: 12.5\nadapter: 2\n")
    with pytest.raises(TraincastError, match=r"'adapter'.*adapters"):
        load_platform(str(path))


def test_a_sheet_called_like_another_gpu_does_not_become_it(tmp_path):
    call = ELEMENTWISE.call("add", elements=1e8, bytes_read=8e8, bytes_written=4e8, tensors=3)
    device = load_platform(sheet(tmp_path, name="v100-pcie")).device
    assert not load_shipped_model("elementwise").predict(Calls.of(ELEMENTWISE, [call]), device).in_domain[0]


@pytest.mark.parametrize(
    ("key", "tflops"), [("v100", 7.8), ("p100", 4.7), ("t4", 0.25), ("l4", 0.49), ("a100-80gb", 19.5), ("h100", 67)]
)
def test_double_precision_runs_at_the_rate_of_the_chip(key, tflops):
    assert load_device(key).get_peak_flops("fp64") == pytest.approx(1e12 * tflops, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "vendor", "capability"),
    [
        ('arch = "ampere"', "nvidia", 8.0),
        ('arch = "ampere"\ncompute_capability = 8.6', "nvidia", 8.6),
        ('arch = "cdna3"', "amd", 0.0),
        ('arch = "cdna9"\nvendor = "amd"', "amd", 0.0),
        ('arch = "next"\nvendor = "nvidia"\ncompute_capability = 12.1', "nvidia", 12.1),
    ],
)
def test_a_sheet_may_be_of_an_architecture_nobody_knows(tmp_path, fields, vendor, capability):
    device = load_platform(sheet(tmp_path, 'arch = "ampere"', fields)).device
    assert (device.vendor, device.compute_capability) == (vendor, capability)


def test_generations_are_of_nvidia_alone():
    hopper, amd = load_device("h100"), load_device("mi300x")
    assert [hopper.is_capability_at_least(at) for at in (8.0, 9.0, 10.0)] == [True, True, False]
    assert [hopper.is_capability_below(at) for at in (8.0, 9.0, 10.0)] == [False, False, True]
    assert not amd.is_capability_at_least(5.0)
    assert not amd.is_capability_below(30.0)


@pytest.mark.parametrize(
    ("key", "made_for_computing"),
    [("p100", True), ("p4", False), ("v100", True), ("t4", False), ("a100-80gb", True), ("a40", False), ("l4", False),
     ("h100", True), ("b200", True), ("mi100", True), ("m40", False)],
)  # fmt: skip
def test_chips_made_for_computing_are_told_from_those_made_for_graphics(key, made_for_computing):
    assert load_device(key).made_for_computing is made_for_computing


def test_fp16_accumulates_in_fp32_and_a_sheet_says_which(tmp_path):
    plain = load_platform(sheet(tmp_path, "bf16 = 125", "fp16 = 62\nfp16_accumulate_fp16 = 124\nbf16 = 62")).device
    assert plain.multiplying_gain == 2.0
    assert plain.get_peak_flops("fp16") == 62e12
    with pytest.raises(TraincastError, match="accumulates in fp16, which PyTorch does not"):
        load_platform(sheet(tmp_path, "bf16 = 125", "fp16 = 124\nbf16 = 62"))
    with pytest.raises(TraincastError, match="'fp16' accumulates in fp32"):
        load_platform(sheet(tmp_path, "bf16 = 125", "fp16 = 62\nfp16_accumulate_fp16 = 31"))


def test_check_bits_on_the_bus_cost_bandwidth(tmp_path):
    calls = Calls.of(ELEMENTWISE, [ELEMENTWISE.call("add", elements=1e8, bytes_read=8e8, bytes_written=4e8, tensors=3)])
    free, checked = (
        load_shipped_model("elementwise").predict(calls, load_platform(sheet(tmp_path, *edit)).device).seconds[0]
        for edit in ((), ("pcie_gen = 4", "pcie_gen = 4\ninline_ecc = true"))
    )
    assert checked / free == pytest.approx(1.21, rel=0.01)
    with pytest.raises(TraincastError, match="'inline_ecc' is 1; give true or false"):
        load_platform(sheet(tmp_path, "pcie_gen = 4", "pcie_gen = 4\ninline_ecc = 1"))

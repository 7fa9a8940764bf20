"""Every platform of the command-line contract is there, and clocks do what they should."""

from __future__ import annotations

import pytest

from traincast.hardware import find_device_by_name, list_platform_keys, load_platform
from traincast.utils.errors import TraincastError

CONTRACT = (
    *("p4", "p100", "titan-xp", "v100", "v100-pcie", "t4", "a30", "a40", "a100-40gb", "a100-80gb", "a100-40gb-pcie"),
    *("a100-80gb-pcie", "l4", "l40s", "h100", "h100-pcie", "h200", "b200", "mi100", "mi210", "mi250", "mi300x"),
    *("gb200", "gb300", "b300", "rtx-pro-6000", "h200-nvl", "h100-nvl", "h100-96gb", "mi325x", "mi350x", "mi355x"),
    *("gb200-nvl72", "gb300-nvl72", "hgx-b300", "pcie-rtx-pro-6000", "pcie-l40s-no-peer", "pcie-a100-no-peer"),
    *("dgx1-v100", "dgx2-v100", "dgx-a100", "dgx-h100", "hgx-h200", "hgx-b200"),
)


def test_every_platform_of_the_contract_is_built_in():
    assert set(CONTRACT) <= set(list_platform_keys())


@pytest.mark.parametrize("key", list_platform_keys())
def test_platform_figures_are_plausible(key):
    device = load_platform(key).device

    assert 4e9 < device.memory_bytes < 400e9
    assert 1e11 < device.dram_bandwidth < 2e13
    assert 5e12 < device.get_peak_flops("fp32") < 3e14
    assert device.get_sustained_flops("fp32") <= device.get_peak_flops("fp32")
    # two flop per core and clock, give or take dual issue
    cores = device.num_sms * device.cores_per_sm * device.boost_clock_mhz * 1e6 * 2
    assert 0.9 < device.get_peak_flops("fp32") / cores < 2.1


@pytest.mark.parametrize(
    ("key", "compute", "tflops"),
    [("gb200", "bf16", 2500), ("gb300", "fp4", 15000), ("b300", "fp4", 13500), ("b200", "fp4", 9000),
     ("mi355x", "fp8", 5033.2), ("rtx-pro-6000", "bf16", 480), ("h100-nvl", "fp8", 1670.5)],
)  # fmt: skip
def test_peaks_of_newer_chips(key, compute, tflops):
    assert load_platform(key).device.get_peak_flops(compute) == pytest.approx(1e12 * tflops)


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA H800", "h800"), ("NVIDIA H20", "h20"), ("AMD Instinct MI250X / MI250", "mi250"),
     ("AMD Instinct MI300X OAM", "mi300x"), ("AMD Instinct MI300X", "mi300x"), ("NVIDIA GeForce RTX 3060", "rtx-3060")],
)  # fmt: skip
def test_devices_are_found_by_every_name_that_drivers_have_for_them(name, key):
    assert find_device_by_name(name).key == key


def test_four_bits_are_no_type_of_older_chips():
    hopper = load_platform("h100").device
    assert "fp4" not in hopper.peak_flops


def test_the_blackwell_card_with_gddr_is_made_for_graphics():
    card, package = load_platform("rtx-pro-6000").device, load_platform("b200").device
    assert (card.made_for_computing, package.made_for_computing) == (False, True)
    # double precision at a 64th, as on every graphics card since Ampere
    assert card.get_peak_flops("fp64") == pytest.approx(120e12 / 64)


def test_less_power_holds_a_lower_clock():
    limited, whole = load_platform("h100-96gb").device, load_platform("h100").device
    assert limited.get_peak_flops("bf16") == pytest.approx(whole.get_peak_flops("bf16"))
    assert limited.get_sustained_flops("bf16") / whole.get_sustained_flops("bf16") == pytest.approx(
        (500 / 700) ** (1 / 3), rel=1e-3
    )


def test_under_load_a_chip_holds_the_clock_of_its_sheet():
    b200, h100 = load_platform("b200").device, load_platform("h100").device
    assert b200.with_sustained_clock().get_sustained_flops("bf16") == pytest.approx(2250e12 * 1450 / 1965)
    assert b200.with_sustained_clock().get_peak_flops("bf16") == b200.get_peak_flops("bf16")
    assert h100.with_sustained_clock() is h100  # nobody measured it
    locked = b200.with_clock(1800)
    assert locked.with_sustained_clock() is locked


def test_a_locked_clock_scales_compute_and_not_memory():
    free = load_platform("v100").device
    locked = free.with_clock(free.boost_clock_mhz / 2)

    assert locked.get_peak_flops("fp32") == pytest.approx(free.get_peak_flops("fp32") / 2)
    assert locked.get_sustained_flops("fp16") == pytest.approx(free.get_peak_flops("fp16") / 2)
    assert locked.dram_bandwidth == free.dram_bandwidth


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(TraincastError, match="a100-80gb"):
        load_platform("a100-80g")
    with pytest.raises(TraincastError, match="Tesla V100"):
        find_device_by_name("Tesla V100-SXM2-12GB")


@pytest.mark.parametrize("clock", [99.0, 1700.0])
def test_a_clock_the_chip_cannot_hold_is_refused(clock):
    with pytest.raises(TraincastError, match=r"out of range for v100; give 100 to 1683 MHz"):
        load_platform("v100").with_clock(clock)


def test_a_compute_type_the_chip_lacks_runs_at_the_rate_of_fp32():
    device = load_platform("p100").device
    assert "bf16" not in device.peak_flops
    assert device.get_peak_flops("bf16") == device.get_peak_flops("fp32")


def test_a_name_of_the_driver_finds_its_device():
    assert find_device_by_name("Tesla V100-SXM2-16GB").key == "v100"


def test_this_machine_cannot_be_measured_yet():
    with pytest.raises(TraincastError, match="which `predict` takes"):
        load_platform("here")


class TestFiles:
    """A user's own platform file."""

    NODE = 'device = "{}"\ngpus_per_node = 4\nlink_gbs = 300\nnetwork_gbs_per_gpu = 12.5\n'

    def write(self, folder, text):
        (folder / "node.toml").write_text(text)
        return str(folder / "node.toml")

    def test_a_node_of_a_built_in_device(self, tmp_path):
        platform = load_platform(self.write(tmp_path, self.NODE.format("a100-80gb")))
        assert (platform.key, platform.device.key, platform.gpus_per_node) == ("node", "a100-80gb", 4)
        assert platform.assumed == ""

    def test_a_node_of_a_device_that_is_not_there(self, tmp_path):
        with pytest.raises(TraincastError, match=r"device file '.*mine.toml' does not exist"):
            load_platform(self.write(tmp_path, self.NODE.format("mine.toml")))
        with pytest.raises(TraincastError, match=r"unknown device 'a100-80'\. Did you mean a100-80gb"):
            load_platform(self.write(tmp_path, self.NODE.format("a100-80")))

    @pytest.mark.parametrize(("text", "message"), [("a = ", "not valid TOML"), ("\xff", "not UTF-8 text")])
    def test_what_is_no_toml(self, tmp_path, text, message):
        path = tmp_path / "node.toml"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(TraincastError, match=message):
            load_platform(str(path))

    def test_a_file_too_large_to_be_a_description(self, tmp_path):
        path = self.write(tmp_path, "#" * (1 << 20) + "\n")
        with pytest.raises(TraincastError, match=r"node\.toml"):
            load_platform(path)


@pytest.mark.parametrize(("name", "key"), [("GeForce RTX 2080 Ti", "rtx-2080-ti"), ("NVIDIA RTX A6000", "rtx-a6000")])
def test_a_board_is_found_as_old_and_new_drivers_name_it(name, key):
    assert find_device_by_name(name).key == key


def test_a_power_limit_moves_clocks_under_load_and_nothing_else():
    board = load_platform("t4").device
    low, high = board.with_power_limit(50), board.with_power_limit(140)
    assert low.sustained_clock_mhz == pytest.approx(board.sustained_clock_mhz * (50 / 70) ** 0.5)
    assert high.sustained_clock_mhz == pytest.approx(board.sustained_clock_mhz * 2**0.5)
    assert (low.boost_clock_mhz, low.dram_bandwidth) == (board.boost_clock_mhz, board.dram_bandwidth)
    strong = load_platform("a100-80gb").device
    assert strong.with_power_limit(330).sustained_clock_mhz == strong.boost_clock_mhz
    assert strong.with_power_limit(200).sustained_clock_mhz < strong.boost_clock_mhz
    with pytest.raises(TraincastError, match="power limit 2000 W is out of range for a100-80gb; give 120 to 800 W"):
        strong.with_power_limit(2000)
    with pytest.raises(TraincastError, match="has no 'power_limit_watts'"):
        load_platform("mi250").device.with_power_limit(300)

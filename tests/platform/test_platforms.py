"""Every platform of the command-line contract is there, and clocks do what they should."""

from __future__ import annotations

import pytest

from traincast.errors import TraincastError
from traincast.platform import device_by_name, load_platform, platform_keys

CONTRACT = (
    *("p4", "p100", "titan-xp", "v100", "v100-pcie", "t4", "a30", "a40", "a100-40gb", "a100-80gb", "a100-40gb-pcie"),
    *("a100-80gb-pcie", "l4", "l40s", "h100", "h100-pcie", "h200", "b200", "mi100", "mi210", "mi250", "mi300x"),
    *("dgx1-v100", "dgx2-v100", "dgx-a100", "dgx-h100", "hgx-h200", "hgx-b200"),
)


def test_every_platform_of_the_contract_is_built_in():
    assert set(CONTRACT) <= set(platform_keys())


@pytest.mark.parametrize("key", platform_keys())
def test_platform_figures_are_plausible(key):
    device = load_platform(key).device

    assert 4e9 < device.memory_bytes < 400e9
    assert 1e11 < device.dram_bandwidth < 2e13
    assert 5e12 < device.peak("fp32") < 3e14
    assert device.sustained("fp32") <= device.peak("fp32")
    # two flop a core and clock, give or take dual issue
    cores = device.num_sms * device.cores_per_sm * device.boost_clock_mhz * 1e6 * 2
    assert 0.9 < device.peak("fp32") / cores < 2.1


def test_a_locked_clock_scales_compute_and_not_memory():
    free = load_platform("v100").device
    locked = free.at_clock(free.boost_clock_mhz / 2)

    assert locked.peak("fp32") == pytest.approx(free.peak("fp32") / 2)
    assert locked.sustained("fp16") == pytest.approx(free.peak("fp16") / 2)
    assert locked.dram_bandwidth == free.dram_bandwidth


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(TraincastError, match="a100-80gb"):
        load_platform("a100-80g")
    with pytest.raises(TraincastError, match="Tesla V100"):
        device_by_name("Tesla V100-SXM2-12GB")

"""Streaming kernels: the shared memory system, and every family on top of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.costs.kernels.model_checks import check_contract
from traincast.costs.kernels.contract import Calls, load_state
from traincast.costs.kernels.families import PROFILES, load_shipped_model
from traincast.costs.kernels.streaming import COPY, ELEMENTWISE, INDEX, MEMCPY, POOL, REDUCTION
from traincast.hardware import list_device_keys, load_device

FAMILIES = (ELEMENTWISE, COPY, REDUCTION, POOL, INDEX, MEMCPY)


def elementwise(elements, kind="add", reads=2, writes=1, item=4, compute="fp32") -> Calls:
    elements = np.atleast_1d(np.asarray(elements, dtype=np.float64))
    tensors = np.full(len(elements), reads + writes)
    values = np.stack([elements, item * elements * reads, item * elements * writes, tensors], axis=1)
    return Calls.from_columns(ELEMENTWISE, [kind] * len(elements), [compute] * len(elements), values)


def seconds(calls: Calls, device) -> np.ndarray:
    return load_shipped_model(calls.family.name).predict(calls, device).seconds


def any_calls(family, n=40) -> Calls:
    """Calls of every kind over many magnitudes."""
    size = np.repeat(np.geomspace(1, 1e9, n), len(family.kinds))
    columns = {
        "row_elements": np.minimum(size, 64),
        "outputs": np.maximum(size / 64, 1),
        "window": np.full(len(size), 9.0),
        "tensors": np.full(len(size), 3.0),
        "elements": size,
    }
    values = np.stack([columns.get(field, 4 * size) for field in family.fields], axis=1)
    return Calls.from_columns(family, list(family.kinds) * n, ["fp32"] * len(size), values)


@pytest.mark.parametrize("key", list_device_keys())
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_contract_on_every_device(family, key):
    check_contract(load_shipped_model(family.name), any_calls(family), load_device(key))


@pytest.mark.parametrize("key", ["v100", "a100-80gb", "h100", "l4", "mi300x", "b200"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_more_work_never_takes_less_time(family, key):
    calls = any_calls(family, n=200)
    took = seconds(calls, load_device(key)).reshape(200, len(family.kinds))
    assert (np.diff(took, axis=0) >= 0).all()


def test_a_tiny_kernel_takes_a_few_microseconds_and_says_how_unsure_it_is():
    estimate = load_shipped_model("elementwise").predict(elementwise(1000), load_device("v100"))
    assert 1e-6 < estimate.seconds[0] < 3e-6
    assert estimate.sigma[0] > 0.2


@pytest.mark.parametrize("key", list_device_keys())
def test_a_huge_kernel_runs_at_the_dram_rate_of_its_kind_of_memory(key):
    device = load_device(key)
    elements = 3e9
    reached = 12 * elements / seconds(elementwise(elements), device)[0] / device.dram_bandwidth
    assert 0.7 < reached < 0.95


def test_data_that_fits_the_l2_is_read_faster_than_from_dram():
    device = load_device("a100-40gb")
    small, large = seconds(elementwise([1.5e6, 1.5e8]), device)
    assert (small - 2e-6) * 100 < 0.8 * (large - 2e-6)


def test_a_locked_clock_leaves_dram_bound_kernels_alone_and_slows_arithmetic():
    device = load_device("mi210")
    slow = device.with_clock(0.5 * device.boost_clock_mhz)
    assert seconds(elementwise(1e8), slow) == pytest.approx(seconds(elementwise(1e8), device), rel=1e-6)
    heavy = elementwise(1e8, kind="pow")
    assert seconds(heavy, slow)[0] > 1.8 * seconds(heavy, device)[0]


def test_a_gpu_known_from_its_sheet_gets_a_wider_interval_and_is_out_of_domain():
    model = load_shipped_model("elementwise")
    known, unknown = (model.predict(elementwise(1e8), load_device(key)) for key in ("v100", "h100"))
    assert known.in_domain[0]
    assert not unknown.in_domain[0]
    assert unknown.sigma[0] > 2 * known.sigma[0]


@pytest.mark.parametrize(
    ("elements", "kind", "reads", "writes", "measured_us"),
    [
        (2048 * 1024, "relu", 1, 1, 21.5), (2048 * 128, "relu", 1, 1, 4.0), (2048 * 1024, "mul", 2, 1, 32.5),
        (2048 * 512, "mul", 2, 1, 17.0), (1024 * 1024, "optimizer", 2, 1, 17.0), (1024 * 1024, "fill", 0, 1, 7.0),
    ],
)  # fmt: skip
def test_device_times_agree_with_a_v100_timeline_that_is_in_no_fit(elements, kind, reads, writes, measured_us):
    device = load_device("v100").with_clock(1297)
    predicted = 1e6 * seconds(elementwise(elements, kind, reads, writes), device)[0]
    assert predicted == pytest.approx(measured_us, rel=0.25, abs=1.0)


@pytest.mark.parametrize(
    ("elements", "kind", "reads", "writes", "measured_us"),
    [
        (256, "add", 2, 1, 3.1), (8192, "relu", 1, 1, 2.8), (16, "tanh", 1, 1, 4.1), (1, "fill", 0, 1, 2.5),
        (32, "copy", 1, 1, 3.8), (256, "strided", 2, 1, 3.1), (262144, "mul", 1, 1, 4.25), (131072, "add", 3, 1, 5.4),
    ],
)  # fmt: skip
def test_the_smallest_kernels_take_what_traces_of_v100_show(elements, kind, reads, writes, measured_us):
    predicted = 1e6 * seconds(elementwise(elements, kind, reads, writes), load_device("v100-32gb"))[0]
    assert predicted == pytest.approx(measured_us, rel=0.35)


@pytest.mark.parametrize(
    ("key", "measured"), [("t4", 0.98), ("p4", 1.0), ("v100-pcie", 1.06), ("p100", 1.23), ("a100-40gb-pcie", 1.4)]
)
def test_offsets_of_unlike_operands_show_where_memory_is_fast(key, measured):
    """A row added to 67M values, alongside the same traffic streamed, as timed op by op in Transformers."""
    sizes = {"elements": 2**26, "bytes_read": 2**28, "bytes_written": 2**28, "tensors": 3}
    calls = Calls.of(ELEMENTWISE, [ELEMENTWISE.call(kind, **sizes) for kind in ("add", "strided")])
    plain, strided = seconds(calls, load_device(key))
    assert strided / plain == pytest.approx(measured, rel=0.16)


def test_a_column_sum_waits_for_one_load_behind_the_other():
    v100 = load_device("v100").with_clock(1297)
    columns = [(16, 256), (1024, 256), (2048, 256), (65536, 256)]
    few, some, many, split = seconds(
        Calls.of(REDUCTION, [
            REDUCTION.call("outer", elements=r * c, outputs=c, bytes_read=4 * r * c, bytes_written=4 * c)
            for r, c in columns
        ]),
        v100,
    )  # fmt: skip
    assert few == pytest.approx(6e-6, rel=0.2)  # 6.1 us in the V100 trace
    assert some == pytest.approx(9.4e-6, rel=0.2)  # 9.4 us in the A100 trace
    assert many == pytest.approx(13e-6, rel=0.25)  # 10.5 to 15 us in the V100 timeline
    assert split - many < 2 * 4 * 65536 * 256 / v100.dram_bandwidth  # rows are split over blocks: only traffic grows


def test_concatenation_takes_longer_the_more_tensors_there_are():
    calls = Calls.of(COPY, [
        COPY.call("cat", elements=6656, bytes_read=26624, bytes_written=26624, tensors=n) for n in (2, 8, 26)
    ])  # fmt: skip
    assert 1e6 * seconds(calls, load_device("v100-32gb")) == pytest.approx([3.1, 5.4, 10.8], rel=0.2)


@pytest.mark.parametrize(
    ("key", "low", "high"), [("v100", 11, 13), ("a100-80gb", 22, 26), ("h100", 45, 55), ("gh200", 300, 360)]
)
def test_a_pinned_copy_runs_at_its_pcie_generation(key, low, high):
    calls = Calls.of(MEMCPY, [MEMCPY.call("h2d_pinned", bytes=1e9), MEMCPY.call("h2d_pageable", bytes=1e9)])
    pinned, pageable = 1.0 / seconds(calls, load_device(key))
    assert low < pinned < high
    assert pageable < pinned


def test_intervals_cover_what_they_promise_on_the_held_out_fifth():
    import json

    for family in ("elementwise", "softmax", "norm", "conv", "attention"):
        provenance = json.loads((PROFILES / f"{family}.json").read_text())
        assert 0.85 <= provenance["interval_coverage_held_out"] <= 0.95, family


def test_profiles_say_where_they_come_from():
    import json

    for path in PROFILES.glob("*.json"):
        provenance = json.loads(path.read_text())
        assert all("(" in source for source in provenance["sources"]), path.name  # the licence


def test_the_fitted_state_is_plain_numbers_of_a_few_kilobytes():
    assert (PROFILES / "elementwise.npz").stat().st_size < 10_000
    assert all(array.dtype.kind in "fiU" for array in load_state(PROFILES / "elementwise").values())


def test_gpus_that_share_a_host_link_copy_at_its_share():
    alone = load_device("a100-40gb")
    kinds = ["h2d_pinned", "d2h_pinned", "h2d_pageable", "d2d"]
    calls = Calls.from_columns(MEMCPY, kinds, ["int8"] * 4, np.full((4, 1), 1e9))
    ratio = seconds(calls, replace(alone, host_sharers=4)) / seconds(calls, alone)
    # four share 24 GB/s; a pageable copy alone reaches 8; inside the device nothing changes
    assert ratio == pytest.approx([4.0, 4.0, 8 / 6, 1.0], rel=2e-3)


def test_a_sum_of_few_elements_takes_as_long_as_its_blocks_and_not_as_its_bytes():
    device = load_device("a100-80gb")
    few, many = seconds(
        Calls.of(REDUCTION, [
            REDUCTION.call("inner", elements=2**26, outputs=2**26 / row, bytes_read=2**28, bytes_written=2**22)
            for row in (16, 4096)
        ]),
        device,
    )  # fmt: skip
    assert 2**28 / device.dram_bandwidth < many < 0.5 * few

from __future__ import annotations

import numpy as np
import pytest

from traincast.costs.host.profile import BETWEEN, load_host_profile
from traincast.costs.kernels.streaming.lowering.index import SINGLE_TILE
from traincast.hardware.platform import load_platform
from traincast.planner.sharding.lookups import Preparation, _count_launches, _count_passes

DEVICE = load_platform("dgx-a100").device
HOST = load_host_profile(DEVICE.host)
SCOPE = "SplitLookupFunctionBackward"


@pytest.fixture(scope="module")
def preparation():
    return Preparation(DEVICE)


@pytest.mark.parametrize(
    ("rows", "passes"), [(1, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3), (1 << 24, 4), ((1 << 32) - 1, 4)]
)
def test_a_pass_for_each_byte_of_a_row_number(rows, passes):
    assert _count_passes(np.array([float(rows)])).tolist() == [passes]


def test_few_lookups_are_sorted_in_one_launch():
    most = float(SINGLE_TILE)
    assert _count_launches(most, 1, False).sum() == _count_launches(1.0, 1, False).sum()
    assert _count_launches(most + 1, 1, False).sum() > _count_launches(most, 1, False).sum()


def test_no_lookups_take_no_time(preparation):
    assert preparation.seconds(np.zeros(2), np.full(2, 1e6), weighted=False).tolist() == [0.0, 0.0]


def test_more_lookups_and_more_rows_take_longer(preparation):
    lookups = np.array([1e3, 1e5, 1e6, 1e7])
    seconds = preparation.seconds(lookups, np.full(4, 1e6), weighted=False)
    assert (np.diff(seconds) > 0).all()
    by_rows = preparation.seconds(np.full(3, 1e7), np.array([200.0, 6e4, 1e7]), weighted=False)
    assert (np.diff(by_rows) > 0).all()


def test_rows_of_equal_passes_are_alike(preparation):
    seconds = preparation.seconds(np.full(2, 1e6), np.array([70_000.0, 16_000_000.0]), weighted=False)
    assert seconds[0] == seconds[1]


def test_weights_are_sorted_along(preparation):
    plain, weighted = (
        preparation.seconds(np.array([1e7]), np.array([1e6]), weighted=flag)[0] for flag in (False, True)
    )
    assert weighted > plain


def test_the_host_waits_only_for_launches_beyond_the_few(preparation):
    most = float(SINGLE_TILE)
    seconds = preparation.host_seconds(
        np.array([most, most + 1.0, 1e9]), np.full(3, 200.0), HOST, SCOPE, weighted=False
    )
    assert seconds[0] == 0.0
    assert seconds[1] == seconds[2] > 0.0


def test_the_host_launches_each_kernel_and_memset_once(preparation):
    kernels, memsets = _count_launches(SINGLE_TILE + 1, 2, False) - _count_launches(1.0, 1, False)
    between = float(HOST.scope_seconds([SCOPE])[0, BETWEEN])
    expected = kernels * (between + HOST.t4["launch"]) + memsets * (between + HOST.t4["memset"])
    seconds = preparation.host_seconds(np.array([1e6]), np.array([60_000.0]), HOST, SCOPE, weighted=False)
    assert seconds[0] == pytest.approx(expected)

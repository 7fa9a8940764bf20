"""Host profiles: look-up, defaults, and the shipped one rebuilt from the published tables."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.costs.host.profile import (
    AFTER,
    ALONE,
    BEFORE,
    BETWEEN,
    get_current_name,
    list_host_profiles,
    load_host_profile,
    parse_host_profile,
)
from traincast.utils.errors import TraincastError

TABLES = {
    "t1_us": {"python": 10, "node": 8, "engine": 1},
    "t2_us": {"aten::linear": 40, "*": 20, "*Backward": 30},
    "t3_us": {"*": 5, "*Backward": 6},
    "t4_us": {"launch": 7, "memcpy": 12, "memset": 7, "synchronize": 7},
    "t5_us": {"aten::linear": 28, "*": 9, "*Backward": 9},
    "alone_us": {"aten::view": 3, "*": 4, "*Backward": 11},
    "spread": 0.1,
    "provenance": {},
}


def test_known_ops_get_their_own_times():
    seconds = parse_host_profile("test", TABLES).scope_seconds(["aten::linear", "aten::view"])

    assert seconds[0, BEFORE] == pytest.approx(40e-6)
    assert seconds[0, BETWEEN] == pytest.approx(28e-6)
    assert seconds[1, ALONE] == pytest.approx(3e-6)


def test_unknown_ops_get_the_default_of_their_kind():
    seconds = parse_host_profile("test", TABLES).scope_seconds(["aten::frobnicate", "FrobnicateBackward0"])

    assert seconds[0, BEFORE] == pytest.approx(20e-6)
    assert seconds[1, BEFORE] == pytest.approx(30e-6)
    assert seconds[1, AFTER] == pytest.approx(6e-6)


def test_the_gap_before_an_op_depends_on_who_issues_it():
    profile = parse_host_profile("test", TABLES)
    ops = ["aten::sum", "AddmmBackward0", "torch::autograd::AccumulateGrad"]

    assert profile.gap_seconds(ops, main=True) == pytest.approx([10e-6] * 3)
    assert profile.gap_seconds(ops, main=False) == pytest.approx([1e-6, 8e-6, 8e-6])
    assert profile.scaled(2.0).gap_seconds(ops, main=False) == pytest.approx([2e-6, 16e-6, 16e-6])


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("AddmmBackward", "AddmmBackward0"),
        ("CudnnConvolutionBackward", "ConvolutionBackward0"),
        ("ReluBackward1", "ReluBackward0"),
        ("SumBackward1", "SumBackward1"),
        ("LookupFunctionBackward", "LookupFunctionBackward"),
        ("aten::linear", "aten::linear"),
    ],
)
def test_nodes_of_older_versions_have_todays_names(then, now):
    assert get_current_name(then) == now


@pytest.mark.parametrize(
    "broken", [{}, {**TABLES, "t2_us": 3}, {**TABLES, "t1_us": "slow"}, {**TABLES, "t1_us": {"python": 10}}]
)
def test_malformed_profiles_are_refused(broken):
    with pytest.raises(TraincastError, match="malformed"):
        parse_host_profile("test", broken)


@pytest.mark.parametrize("name", list_host_profiles())
def test_every_shipped_profile_loads_and_says_where_it_comes_from(name):
    profile = load_host_profile(name)

    assert profile.provenance["sources"]
    assert np.isfinite(profile.scope_seconds(["aten::linear", "AddmmBackward0"])).all()

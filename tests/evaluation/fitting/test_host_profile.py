"""A host profile from measured overheads."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.costs.host.profile import parse_host_profile
from traincast.traces.overheads.extraction import Distribution, Overheads
from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting.host_profile import build_host_profile, pool_overheads


def overheads(**samples):
    """Overheads of samples in microseconds, by "type/name"."""
    table = {tuple(key.split("/", 1)): Distribution.from_samples(1e-6 * np.array(us)) for key, us in samples.items()}
    return Overheads(table)


def measured(**more):
    return overheads(**{"T1/python": [5.0, 7.0], "T4/launch": [4.0] * 5, "T2/aten::mm": [10.0, 12.0, 14.0], **more})


def test_an_op_gets_the_mean_of_its_samples():
    profile = build_host_profile([measured()], {"source": "made up"})

    assert profile["t2_us"]["aten::mm"] == pytest.approx(12.0)
    assert profile["provenance"] == {"source": "made up"}
    assert profile["distributions_us"]["T2"]["aten::mm"]["count"] == 3


def test_gaps_over_100_us_are_the_users_own_work():
    profile = build_host_profile([measured(**{"T1/python": [6.0, 8.0, 5000.0]})], {})

    assert profile["t1_us"]["python"] == pytest.approx(7.0)


def test_an_issuer_that_was_not_seen_has_the_gaps_of_python():
    profile = build_host_profile([measured()], {})

    assert profile["t1_us"]["engine"] == profile["t1_us"]["python"] == pytest.approx(6.0)


def test_ops_seen_once_only_count_for_those_nobody_measured():
    profile = build_host_profile([measured(**{"T2/aten::add": [30.0]})], {})

    assert "aten::add" not in profile["t2_us"]
    assert profile["t2_us"]["*"] == pytest.approx((12.0 + 30.0) / 2)


def test_nodes_nobody_measured_have_a_median_of_their_own():
    profile = build_host_profile([measured(**{"T2/MmBackward0": [40.0] * 3})], {})

    assert profile["t2_us"]["*Backward"] == pytest.approx(40.0)
    assert profile["t2_us"]["*"] == pytest.approx(12.0)


def test_a_synchronisation_costs_what_one_takes_that_finds_nothing_to_wait_for():
    profile = build_host_profile([measured(**{"T4/synchronize": [3.0, 500.0, 900.0, 1200.0]})], {})

    assert profile["t4_us"]["synchronize"] == pytest.approx(3.0)


def test_samples_of_several_workloads_are_pooled():
    both = pool_overheads([measured(), measured(**{"T2/aten::mm": [20.0, 22.0, 24.0]})])

    assert both.select_type("T2")["aten::mm"].count == 6
    assert both.sum_by_type()["T2"] == pytest.approx((36 + 66) * 1e-6)


def test_a_built_profile_is_one_that_can_be_loaded():
    profile = parse_host_profile("mine", build_host_profile([measured()], {}))

    assert profile.t2["aten::mm"] == pytest.approx(12e-6)
    assert profile.knows("aten::mm")
    assert not profile.knows("aten::bmm")


def test_overheads_without_launches_are_refused():
    with pytest.raises(TraincastError, match="needs a trace with ops that launch kernels"):
        build_host_profile([overheads(**{"T1/python": [5.0]})], {})


def test_a_slower_host_takes_longer_for_everything():
    profile = parse_host_profile("mine", build_host_profile([measured()], {}))

    slower = profile.scaled(2.0)

    for table in ("t1", "t2", "t3", "t4", "t5", "alone"):
        before, after = getattr(profile, table), getattr(slower, table)
        assert after == pytest.approx({name: 2.0 * seconds for name, seconds in before.items()})
    with pytest.raises(TraincastError, match="a host cannot be 1000 times as slow"):
        profile.scaled(1000.0)

"""A profile completed by another one."""

from __future__ import annotations

import pytest

from traincast.costs.host.profile import BEFORE, parse_host_profile
from traincast_evaluation.fitting.host_profile import fill_host_profile


def profile(t1, t2):
    tables = {key: {"*": 1, "*Backward": 1} for key in ("t3_us", "t5_us", "alone_us")}
    tables["t2_us"] = {"*": 9, "*Backward": 9, **t2}
    tables["t4_us"] = {"launch": 4, "memcpy": 4, "memset": 4, "synchronize": 4}
    return {"t1_us": dict.fromkeys(("python", "node", "engine"), t1), "spread": 0.2, "provenance": {}, **tables}


FAST = profile(5, {"aten::linear": 20, "aten::relu": 8, "aten::add": 6})
SLOW = profile(10, {"aten::linear": 40, "aten::relu": 16, "aten::add": 60, "aten::conv2d": 100})


def test_ops_of_the_other_host_are_scaled_by_the_median_ratio():
    filled = fill_host_profile(FAST, SLOW)

    assert filled["t2_us"]["aten::conv2d"] == 50
    assert filled["provenance"]["filled_scale"] == 0.5
    assert filled["provenance"]["ops_in_both"] == 3


def test_what_was_measured_on_the_first_host_stays():
    filled = parse_host_profile("filled", fill_host_profile(FAST, SLOW))

    assert filled.t1["node"] == pytest.approx(5e-6)
    assert filled.t2["aten::linear"] == pytest.approx(20e-6)
    assert filled.scope_seconds(["aten::unheard_of"])[0, BEFORE] == pytest.approx(9e-6)

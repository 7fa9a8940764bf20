"""Host profiles: look-up, defaults, and the shipped one rebuilt from the published tables."""

from __future__ import annotations

import json

import pytest

from traincast.errors import TraincastError
from traincast.fit.host import PROFILE, fit_host
from traincast.host.profile import AFTER, ALONE, BEFORE, BETWEEN, load_host_profile, parse_host_profile

TABLES = {
    "t1_us": 10,
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

    assert seconds[0, BEFORE] == pytest.approx(50e-6)
    assert seconds[0, BETWEEN] == pytest.approx(28e-6)
    assert seconds[1, ALONE] == pytest.approx(13e-6)


def test_unknown_ops_get_the_default_of_their_kind():
    seconds = parse_host_profile("test", TABLES).scope_seconds(["aten::frobnicate", "FrobnicateBackward0"])

    assert seconds[0, BEFORE] == pytest.approx(30e-6)
    assert seconds[1, BEFORE] == pytest.approx(40e-6)
    assert seconds[1, AFTER] == pytest.approx(6e-6)


@pytest.mark.parametrize("broken", [{}, {**TABLES, "t2_us": 3}, {**TABLES, "t1_us": "slow"}])
def test_malformed_profiles_are_refused(broken):
    with pytest.raises(TraincastError, match="malformed"):
        parse_host_profile("test", broken)


def test_shipped_profile_is_what_the_tables_give(shared_data, tmp_path):
    fit_host(shared_data, tmp_path, lambda *_: None)

    shipped = load_host_profile(PROFILE)
    rebuilt = parse_host_profile(PROFILE, json.loads((tmp_path / f"{PROFILE}.json").read_text()))
    assert rebuilt.scope_seconds(["aten::linear", "AddmmBackward0"]) == pytest.approx(
        shipped.scope_seconds(["aten::linear", "AddmmBackward0"])
    )
    assert rebuilt.t4 == shipped.t4


def test_missing_tables_are_named(tmp_path):
    with pytest.raises(TraincastError, match=r"t1_t2_by_op_model\.csv"):
        fit_host(tmp_path, tmp_path, lambda *_: None)

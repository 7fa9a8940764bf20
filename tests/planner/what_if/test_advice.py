"""Advice and sensitivities."""

from __future__ import annotations

import json
import math

import pytest

import traincast
from traincast.app.report.whatif import format_advice, format_sensitivity
from traincast.planner.what_if.advice import _describe_risk
from traincast.planner.what_if.edits.registry import parse_edits


@pytest.fixture(scope="module")
def advice():
    return traincast.advise("dlrm-ddp", on="v100", price=2.0)


def test_the_largest_gain_comes_first_and_pairs_beat_their_parts(advice):
    gains = [one.gain for one in advice.suggestions]
    assert gains == sorted(gains, reverse=True)
    alone = {one.answer.edits[0]: one.gain for one in advice.suggestions if len(one.answer.edits) == 1}
    pairs = [one for one in advice.suggestions if len(one.answer.edits) == 2]
    assert pairs
    assert all(one.gain > max(alone[edit] for edit in one.answer.edits) for one in pairs)


def test_the_best_three_are_explained_and_the_others_named(advice):
    assert [bool(one.why) for one in advice.suggestions[:4]] == [True, True, True, False]
    assert "ms of host instead of" in advice.suggestions[0].why  # a small DLRM on a fast GPU waits for its host
    assert "in one op already" in advice.refused["fuse-embedding-bags"]
    assert "dtype=tf32" in advice.useless  # a V100 has no such units
    text = format_advice(advice)
    assert "accuracy" in text and "$" in text
    json.dumps(advice.to_dict(), allow_nan=False)


def test_a_gain_has_an_interval_that_says_whether_it_is_certain(advice):
    for one in advice.suggestions:
        low, high = one.to_dict()["gain_interval"]
        assert low < one.gain < high
        assert one.certain == (low > 0 or high < 0)


def test_elasticities_of_a_step_add_up():
    # given a step whose kernels and host make up all of its time
    result = traincast.sensitivity("dlrm-default", on="v100")

    # then a machine that is faster by 1 % in all of it is faster by 1 %, but for copies over PCIe and fixed costs
    e = result.elasticities
    whole = -e["memory bandwidth"] - e["SM clock"] + e["host overheads"]
    assert 0.8 < whole < 1.05
    assert "link bandwidth" not in e
    assert abs(e["launch cost"]) <= abs(e["host overheads"])
    assert "elasticity" in format_sensitivity(result)


def test_measurements_narrow_the_interval_the_best_first():
    result = traincast.sensitivity("dlrm-default", on="v100")
    left = list(result.measurements.values())
    assert left == sorted(left)
    assert all(0 < width <= result.half_width * (1 + 1e-12) for width in left)
    low, high = result.step.interval
    assert math.isclose(result.half_width, high / result.step.iteration - 1, rel_tol=1e-9)
    assert low > 0


def test_risks_are_those_of_the_values_and_said_once():
    wanted = parse_edits(["batch-size=x2", "dtype=bf16", "plan=search"])
    assert _describe_risk(wanted) == "accuracy: another batch, numbers of 7 bits; tables must be moved"
    assert "scaled" in _describe_risk(parse_edits(["dtype=fp16"])) and "scaled" not in _describe_risk(
        parse_edits(["dtype=tf32"])
    )


def test_advice_for_a_step_that_does_not_fit_begins_with_what_makes_it_fit():
    advice = traincast.advise("mpt-1b", on="v100", batch_size=8)
    text = format_advice(advice)
    assert advice.remedies and all(one.prediction.memory.fits for one in advice.remedies)
    assert text.index("would fit with") < text.index("gain per sample")
    assert advice.to_dict()["remedies"] and not advice.to_dict()["fits"]


def test_a_layout_that_does_not_fit_is_told_first_what_makes_it_fit() -> None:
    advice = traincast.advise("mpt-1b", on="a100-40gb", batch_size=8)

    assert not advice.before.fits
    assert advice.suggestions[0].answer.after.fits
    assert any("checkpoint=full" in one.answer.edits and one.answer.after.fits for one in advice.suggestions)
    assert "program=torchrec-pipelined" not in advice.refused
    assert "does not fit" in format_advice(advice).splitlines()[1]

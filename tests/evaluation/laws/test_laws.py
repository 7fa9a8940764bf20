"""The library of laws: every option that has one says it, what breaks one is seen, exceptions have their physics."""

from __future__ import annotations

import dataclasses
import random

import pytest

from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import LAWS, Scenario, list_scenario_fields
from traincast_evaluation.laws.answers import check_answer
from traincast_evaluation.laws.drawing import draw_scenario, find_kind
from traincast_evaluation.laws.exceptions import EXCEPTIONS, find_exception
from traincast_evaluation.laws.relations import Pair, list_pairs, pair_field

STEP = Scenario(workload="dlrm-ddp", on="v100", batch_size=64)


@pytest.fixture(scope="module")
def result():
    return predict(STEP)


def test_declared_laws_are_known_ones():
    fields = list_scenario_fields().values()
    assert {law for info in fields for law in info.laws} <= set(LAWS)
    assert sum(bool(info.laws) for info in fields) > 35


def test_scenarios_are_of_every_kind_and_the_same_for_the_same_seed():
    drawn = [draw_scenario(random.Random(seed)) for seed in range(300)]
    assert {find_kind(scenario) for scenario in drawn} >= {"model", "dlrm", "parallel", "program"}
    assert len({str(scenario.on) for scenario in drawn}) > 60
    assert drawn[7] == draw_scenario(random.Random(7))


def test_an_answer_that_does_not_add_up_is_seen(result):
    assert list(check_answer(result)) == []
    for change, law in (
        ({"interval": (2 * result.iteration, 3 * result.iteration)}, "the interval contains the value"),
        ({"device_idle": 0.5 * result.device_idle}, "active + idle = step"),
        ({"by_phase": {"forward": 1.0}}, "families and phases sum to the same"),
        ({"device_active": 2 * result.iteration, "device_idle": -result.iteration}, "kernels cover the active time"),
    ):
        assert law in [name for name, *_ in check_answer(dataclasses.replace(result, **change))]


@pytest.mark.parametrize(("slower", "factor", "broken"), [("second", 0.5, "slower"), ("first", 2.0, "faster")])
def test_a_pair_in_the_wrong_order_is_seen(result, slower, factor, broken):
    other = dataclasses.replace(result, iteration=factor * result.iteration)
    pair = Pair("batch_size", STEP, STEP, slower=slower)
    ((law, _, by),) = pair.judge(result, other)
    assert law == f"batch_size: {broken}" and by == pytest.approx(2.0)
    assert list(pair.judge(result, result)) == []


def test_every_field_with_a_law_makes_a_pair_where_it_is_used():
    fields = list_scenario_fields()
    layout = Scenario(workload="mixtral-8x7b", on="dgx-h100", gpus=8, micro_batch=1, global_batch=16, seq_len=512)
    made = {
        name
        for scenario in (STEP, STEP.replace(gpus=2, on="dgx-a100"), layout, layout.replace(tp=2, ep=2, fsdp=2))
        for name, info in fields.items()
        if info.laws and pair_field(scenario, info, random.Random(1)) is not None
    }
    assert {name for name, info in fields.items() if info.laws} - made == set()
    assert len(list_pairs(STEP, random.Random(1))) > 20


def test_exceptions_say_why():
    assert all(len(known.physics) > 30 for known in EXCEPTIONS)
    assert find_exception("active + idle = step", STEP, 1.0) is None

"""Collectives take longer inside steps than alone: found again from steps of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.costs.cpu.made_up import IDENTITY, REFERENCE, exchange_samples, exchange_seconds, samples
from traincast.calibration.fit import add_late_collectives, fit_profile, parse_plan, write_plan_text
from traincast.costs.cpu.collectives import CpuCollective, fit_collectives
from traincast.costs.cpu.profile import load_profile, save_profile
from traincast.costs.cpu.samples import Sample, format_sample, parse_row
from traincast.simulator.cpu.instructions import RankPlan, Stretch, compute_step_seconds
from traincast.utils.errors import TraincastError

SUMS = [CpuCollective("all_reduce", 1 << 20), CpuCollective("all_reduce", 1 << 14)]
LATE = 5e-4


def step_of_ranks(computing, sums=SUMS, late=LATE, spread=0.2, jitter=0.0):
    """A step of two ranks that compute for this many seconds and wait for each sum in its turn."""
    share = computing / (len(sums) + 1)
    stretches = [
        one for number in range(len(sums)) for one in (Stretch(share, calls=number), Stretch(0.0, awaits=number))
    ]
    plan = RankPlan((*stretches, Stretch(share)), tuple(sums))
    wall = compute_step_seconds([plan, plan], lambda met: exchange_seconds(met) + late, jitter)
    return Sample(
        signature=None, between=0, access="", wall=wall, busy=computing, reference_wall=REFERENCE,
        reference_busy=REFERENCE, spread=spread, ranks=2, plan=write_plan_text(plan),
    )  # fmt: skip


def test_a_plan_comes_back_with_the_seconds_that_it_is_given():
    plan = RankPlan(
        (Stretch(1.0, calls=0), Stretch(3.0, awaits=0), Stretch(0.0)), (CpuCollective("all_to_all_v", 12, (4, 8)),)
    )
    again = parse_plan(write_plan_text(plan), 8.0)
    assert again.exchanges == plan.exchanges
    assert again.stretches == (Stretch(2.0, calls=0), Stretch(6.0, awaits=0), Stretch(0.0))


@pytest.mark.parametrize(
    "text", ["", "[]", "[[], []]", "[[[1, 3, -1]], []]", '[[["x", 0, 0]], []]', "[[[NaN, -1, -1]], []]"]
)
def test_a_damaged_plan_is_refused(text):
    with pytest.raises(TraincastError, match="a step of ranks in the store is damaged"):
        parse_plan(text, 1.0)


def test_what_collectives_take_longer_in_steps_is_found_again():
    models, _ = fit_collectives(exchange_samples("all_reduce"), REFERENCE)
    steps = [
        step_of_ranks(computing, SUMS[: 1 + number % 2]) for number, computing in enumerate((2e-3, 5e-3, 2e-2, 4e-2))
    ]
    found = add_late_collectives(models, steps, REFERENCE, 0.0)
    assert found.late == pytest.approx(LATE, rel=0.1)
    assert found.in_step(SUMS[:1] * 2) == pytest.approx(found.cost(SUMS[:1] * 2) + found.late)
    # steps that say too little, or that gloo was never slower in, leave collectives as they are alone
    assert add_late_collectives(models, [step_of_ranks(1e-2, spread=2.0)], REFERENCE, 0.0).late == 0.0
    assert add_late_collectives(models, [step_of_ranks(1e-2, late=-1e-4)], REFERENCE, 0.0).late == 0.0
    assert (
        add_late_collectives(models, [step_of_ranks(1e-2, [CpuCollective("broadcast", 8)])], REFERENCE, 0.0).late == 0.0
    )


def test_steps_beside_a_slow_reference_do_not_count():
    models, _ = fit_collectives(exchange_samples("all_reduce"), REFERENCE)
    calm = [step_of_ranks(computing) for computing in (5e-3, 2e-2, 4e-2)]
    crowded = [replace(one, wall=3 * one.wall, reference_wall=1.2 * REFERENCE) for one in calm]
    assert add_late_collectives(models, [*crowded, *calm], REFERENCE, 0.0).late == pytest.approx(LATE, rel=0.1)


def test_waiting_that_the_walk_knows_of_is_not_counted_twice():
    models, _ = fit_collectives(exchange_samples("all_reduce"), REFERENCE)
    steps = [step_of_ranks(computing, jitter=0.2) for computing in (5e-3, 2e-2, 4e-2)]
    assert add_late_collectives(models, steps, REFERENCE, 0.2).late == pytest.approx(LATE, rel=0.1)


def test_a_profile_keeps_it(tmp_path):
    steps = [parse_row(format_sample(step_of_ranks(computing))) for computing in (5e-3, 2e-2, 4e-2)]
    still = [one for one in samples(200) if one.reference_wall == REFERENCE]
    profile, _ = fit_profile([*still, *exchange_samples("all_reduce"), *steps], IDENTITY, "wall")
    assert profile.exchanges.late == pytest.approx(LATE, rel=0.1) and profile.host["step"] > 0
    save_profile(profile, tmp_path / "p.toml")
    again = load_profile(tmp_path / "p.toml").exchanges
    assert (again.late, again.widened) == (profile.exchanges.late, profile.exchanges.widened)

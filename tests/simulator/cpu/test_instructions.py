"""Ranks that compute on one core each and exchange over it: exact times of small plans."""

from __future__ import annotations

import math

import pytest

from traincast.costs.cpu.collectives import CpuCollective
from traincast.simulator.cpu.instructions import RankPlan, Stretch, compute_step_seconds
from traincast.utils.errors import TraincastError

SUM = CpuCollective("all_reduce", 1000)


def plan(*stretches, exchanges=(SUM,)):
    return RankPlan(tuple(stretches), tuple(exchanges))


def fixed(seconds):
    return lambda exchanges: seconds


def test_a_rank_alone_takes_the_sum_of_what_it_computes():
    alone = plan(Stretch(2.0), exchanges=())
    assert compute_step_seconds([alone], fixed(1.0)) == pytest.approx(2.0)


def test_a_collective_begins_when_the_last_rank_calls_it():
    early = plan(Stretch(1.0, calls=0), Stretch(0.0, awaits=0), Stretch(2.0))
    late = plan(Stretch(4.0, calls=0), Stretch(0.0, awaits=0), Stretch(1.0))
    assert compute_step_seconds([early, late], fixed(3.0)) == pytest.approx(4.0 + 3.0 + 2.0)


def test_what_is_computed_meanwhile_waits_for_the_core_that_gloo_takes():
    both = plan(Stretch(1.0, calls=0), Stretch(5.0, awaits=0), Stretch(0.5))
    assert compute_step_seconds([both, both], fixed(4.0)) == pytest.approx(1.0 + 4.0 + 5.0 + 0.5)


def test_collectives_run_one_after_the_other():
    two = plan(Stretch(1.0, calls=0), Stretch(0.0, calls=1), Stretch(0.0, awaits=1), Stretch(0.0), exchanges=(SUM, SUM))
    assert compute_step_seconds([two, two], fixed(3.0)) == pytest.approx(1.0 + 3.0 + 3.0)


def test_waiting_for_what_has_ended_costs_nothing():
    both = plan(Stretch(1.0, calls=0), Stretch(9.0, awaits=0), Stretch(1.0))
    assert compute_step_seconds([both, both], fixed(2.0)) == pytest.approx(1.0 + 2.0 + 9.0 + 1.0)


def test_ranks_that_disagree_are_refused():
    other = plan(
        Stretch(1.0, calls=0), Stretch(0.0, awaits=0), Stretch(0.0), exchanges=(CpuCollective("all_gather", 8),)
    )
    mine = plan(Stretch(1.0, calls=0), Stretch(0.0, awaits=0), Stretch(0.0))
    with pytest.raises(TraincastError, match="disagree on the order of their collectives"):
        compute_step_seconds([mine, other], fixed(1.0))


def test_a_collective_that_nobody_calls_is_waited_for_in_vain():
    stuck = plan(Stretch(0.0, awaits=0), Stretch(0.0, calls=0), Stretch(0.0))
    with pytest.raises(TraincastError, match="wait for each other for ever"):
        compute_step_seconds([stuck, stuck], fixed(1.0))


def test_ranks_that_vary_from_step_to_step_wait_for_whoever_is_late():
    both = plan(Stretch(1.0, calls=0), Stretch(0.0, awaits=0), Stretch(0.0))
    alone = plan(Stretch(1.0), exchanges=())
    late = compute_step_seconds([both, both], fixed(0.0), jitter=0.1)
    assert late == pytest.approx(1.0 + 0.1 / math.pi**0.5, rel=0.02), "the mean of the larger of two"
    assert compute_step_seconds([alone], fixed(0.0), jitter=0.1) == pytest.approx(1.0, rel=0.01)
    assert late == compute_step_seconds([both, both], fixed(0.0), jitter=0.1), "the same each time"

"""Which measurement narrows an interval most."""

from __future__ import annotations

import math

import pytest

from traincast.utils.metrics import MEASURED, Z90, Part, compute_half_width, order_by_narrowing, rank_by_remaining_width

PARTS = {
    "large and known": Part(0.6, MEASURED, "a"),
    "large and unsure": Part(0.3, 0.5, "b"),
    "small and unsure": Part(0.05, 0.5, "b"),
    "alone": Part(0.05, 0.9),
}


def test_errors_of_one_group_add_up_and_groups_are_independent():
    error = math.hypot(0.6 * MEASURED, 0.35 * 0.5, 0.05 * 0.9)
    assert compute_half_width(PARTS) == pytest.approx(math.exp(Z90 * error) - 1)


def test_what_takes_long_and_is_unsure_comes_first_and_what_is_known_last():
    left = rank_by_remaining_width(PARTS)
    assert next(iter(left)) == "large and unsure"
    assert list(left)[-1] == "large and known"
    assert left["large and known"] == pytest.approx(compute_half_width(PARTS))


def test_in_turn_each_measurement_narrows_what_those_before_have_left():
    order = order_by_narrowing(PARTS)
    assert set(order) == set(PARTS) and next(iter(order)) == next(iter(rank_by_remaining_width(PARTS)))
    widths = list(order.values())
    assert widths == sorted(widths, reverse=True)
    measured = {name: Part(part.share, min(part.spread, MEASURED), part.group) for name, part in PARTS.items()}
    assert widths[-1] == pytest.approx(compute_half_width(measured))


def test_a_step_of_nothing_is_certain():
    assert compute_half_width({}) == 0 and rank_by_remaining_width({}) == {} and order_by_narrowing({}) == {}

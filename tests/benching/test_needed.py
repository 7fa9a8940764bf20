"""What a step needs measured, and how much of its time that covers."""

from __future__ import annotations

import pytest

from tests.benching.test_measure import TINY
from traincast.benching.needed import Coverage
from traincast.benching.plans import FAR_BYTES
from traincast.calibration.features import kind_of
from traincast.questions.here import captured_here
from traincast.questions.variant import Variant


@pytest.fixture(scope="module")
def program():
    return captured_here(TINY, Variant(batch_size=64))[0].programs[0]


def test_nothing_measured_covers_nothing_and_everything_all(program):
    coverage = Coverage(program)
    assert coverage.share() == 0.0
    shares = []
    for task in coverage.tasks:
        coverage.add(task, 1e-5)
        shares.append(coverage.share())
    assert shares[-1] == pytest.approx(1.0)
    assert 0.0 < shares[0] < 1.0


def test_what_was_not_measured_is_guessed_at_the_speed_of_what_was(program):
    fast, slow = Coverage(program), Coverage(program)
    first = fast.tasks[0]
    fast.add(first, 1e-6)
    slow.add(first, 1e-3)
    assert fast.share() == pytest.approx(slow.share()), "a machine that is slower is slower for the rest as well"


def test_ops_are_measured_where_their_operands_lie(program):
    states = {kind_of(task.signature): task.between for task in Coverage(program).tasks}
    assert set(states.values()) <= {0, 1 << 20, 4 << 20, 16 << 20, FAR_BYTES}
    assert min(states.values()) < FAR_BYTES, "a tiny step keeps its operands in the cache"

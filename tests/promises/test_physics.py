"""Promise: answers obey physics. A seeded slice; `scripts/check_laws.py` tries as many as asked."""

from __future__ import annotations

import pytest

from traincast_evaluation.laws.trial import run_trial

SEEDS = range(12)
TRIES = 74
"""Scenarios that the seeds make."""


@pytest.mark.parametrize("seed", SEEDS)
def test_random_scenarios_obey(seed):
    trial = run_trial(seed)

    assert [violation for violation in trial.violations if not violation.excused] == []
    assert trial.answered + trial.rejected > 0

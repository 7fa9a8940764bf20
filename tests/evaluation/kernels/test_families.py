"""The table of measured families: every function that it names is there, and every profile has one that writes it."""

from __future__ import annotations

import pytest

from traincast.costs.kernels.families import RECORDS
from traincast_evaluation.kernels.families import MEASURED


@pytest.mark.parametrize("measured", MEASURED, ids=lambda measured: measured.family.name)
def test_every_function_that_the_table_names_is_there(measured):
    assert callable(measured.fit_function())
    assert all(callable(function) for function in measured.evaluation_functions())


def test_every_shipped_profile_is_fitted_once():
    profiles = sorted(measured.profile for measured in MEASURED)

    assert profiles == sorted({record.profile for record in RECORDS if record.profile})

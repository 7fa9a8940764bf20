"""Distributions of times: what a profile takes from them."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.traces.overheads.extraction import Distribution


def test_mean_below_a_limit_leaves_out_what_is_longer():
    gaps = Distribution.from_samples(np.array([5e-6, 15e-6, 40e-6, 900e-6]))

    assert gaps.compute_mean_below(100e-6) == pytest.approx(20e-6)
    assert gaps.compute_mean_below(1.0) == pytest.approx(240e-6)
    assert gaps.compute_mean_below(1e-6) == 0.0

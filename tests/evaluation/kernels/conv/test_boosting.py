"""Boosted trees as arrays."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.conv.model import Boosting
from traincast_evaluation.kernels.conv.boosting import boost


def test_boosted_trees_learn_a_step_extrapolate_flat_and_survive_their_state():
    random = np.random.default_rng(6)
    features = random.uniform(0, 1, (4000, 3))
    target = np.where(features[:, 1] > 0.5, 0.3, -0.2)
    trees = boost(features, target, np.ones(4000), trees=400, depth=3)
    far = np.array([[0.5, 0.9, 0.5], [0.5, 99.0, 0.5], [0.5, 0.1, 0.5], [0.5, -99.0, 0.5]])
    predicted = trees.predict(far)
    np.testing.assert_allclose(predicted, [0.3, 0.3, -0.2, -0.2], atol=0.03)
    assert predicted[0] == predicted[1]
    assert np.array_equal(Boosting.from_state(trees.state("x"), "x").predict(far), predicted)

"""Training of the networks that correct GEMMs."""

from __future__ import annotations

import numpy as np

from traincast_evaluation.kernels.gemm.network import Examples, Schedule, train


def one_in_four_twice_as_slow(tail: float) -> Examples:
    """A kernel of 1 ms whatever the feature; one reading in four was taken at half of the clock."""
    random = np.random.default_rng(2)
    n = 800
    seconds = np.where(random.random(n) < 0.25, 2e-3, 1e-3) * np.exp(0.05 * random.standard_normal(n))
    zeros = np.zeros(n, dtype=np.int64)
    return Examples(
        features=random.standard_normal((3, n)).astype(np.float32), fixed=0.0, physical=np.full(n, 1e-3),
        device=zeros, measured=seconds, weight=np.ones(n), tail=np.full(n, tail),
        group=zeros, floor=np.zeros(1), offset=np.zeros(1),
    )  # fmt: skip


def test_readings_of_another_clock_state_count_less_where_a_tail_is_given():
    def typical(tail: float) -> float:
        examples = one_in_four_twice_as_slow(tail)
        net, _, _ = train(examples, Schedule(widths=(16, 8), passes=40))
        return float(np.median(net.correction(examples.features, net.codes[0])))

    assert abs(typical(0.1)) < 0.02
    assert typical(np.inf) > typical(0.1) + 0.01

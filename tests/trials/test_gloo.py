"""Curves of gloo's collectives: medians in units of the reference, uneven messages, what is missing."""

from __future__ import annotations

import pytest

from traincast.errors import TraincastError
from traincast.trials.gloo import KINDS, SIZES, gloo_curves, gloo_jobs
from traincast.trials.together import Exchange


def row(kind, size, step, busy=0.5):
    return {
        "collective": kind,
        "bytes": size,
        "step": [step, step, 9 * step],
        "busy": [busy] * 3,
        "reference": [2.0] * 3,
    }


def curves(**times):
    rows = [row(kind, size, step) for kind in KINDS for size, step in times.get(kind, {1000: 1.0, 3000: 2.0}).items()]
    return gloo_curves(rows, nominal=0.5)


def test_jobs_are_every_kind_at_every_size():
    jobs = gloo_jobs()
    assert len(jobs) == len(KINDS) * len(SIZES)
    assert jobs[0] == {"collective": "all_reduce", "bytes": 1024, "seconds": 1.0}


def test_times_are_medians_for_the_nominal_reference_and_lines_between_sizes():
    cost = curves().cost([Exchange("all_reduce", 2000)] * 2)
    assert cost.seconds == pytest.approx(0.5 * (0.25 + 0.5))
    assert cost.busy == pytest.approx(0.125)


def test_a_rank_is_never_busier_than_the_exchange_is_long():
    rows = [row(kind, size, 1.0, busy=5.0) for kind in KINDS for size in (1000, 3000)]
    cost = gloo_curves(rows, nominal=2.0).cost([Exchange("all_gather", 1000)] * 2)
    assert cost.busy == cost.seconds == pytest.approx(1.0)


def test_a_larger_message_takes_no_less_time():
    lucky = curves(all_reduce={1000: 3.0, 2000: 1.0, 4000: 5.0})
    assert lucky.cost([Exchange("all_reduce", 2000)] * 2).seconds == pytest.approx(0.75)


def test_an_uneven_exchange_takes_as_long_as_an_even_one_that_moves_as_much():
    uneven = [Exchange("all_to_all_v", 0, (700, 500)), Exchange("all_to_all_v", 0, (1500, 10))]
    even = [Exchange("all_to_all", 2000)] * 2  # a rank keeps half of its 2000 bytes
    assert curves().cost(uneven).seconds == pytest.approx(curves().cost(even).seconds)


def test_a_kind_that_was_not_measured_is_refused():
    with pytest.raises(TraincastError, match="gloo's broadcast was not measured here"):
        curves().cost([Exchange("broadcast", 10)] * 2)
    with pytest.raises(TraincastError, match="gloo's all_reduce was measured at 1 sizes; a curve needs two"):
        gloo_curves([row("all_reduce", 1000, 1.0)], nominal=1.0)

"""Ranks launched as torchrun would: results as they come, and clear words when one fails."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch")

from traincast.errors import TraincastError
from traincast.trials.catalog import CNN, Trial
from traincast.trials.ranks import run_ranks


def test_two_ranks_measure_a_collective_and_a_step():
    trial = Trial(group=CNN, name="plain-mini", batch_size=1, ranks=2)
    heard = []
    jobs = [
        {"collective": "all_reduce", "bytes": 65536, "seconds": 0.02},
        {"trial": trial.to_dict(), "seconds": 0.02},
    ]
    run_ranks(jobs, 2, each=heard.append)
    assert [job.get("collective") for job in heard] == ["all_reduce", None]
    assert Trial.from_dict(heard[1]["trial"]) == trial
    for result in heard:
        times = [result[name] for name in ("step", "busy", "reference", "reference_busy")]
        assert len({len(values) for values in times}) == 1 and len(times[0]) >= 5
        assert all(value > 0 for values in times for value in values)


def test_a_rank_that_fails_says_why():
    jobs = [{"collective": "gossip", "bytes": 8, "seconds": 0.01}]
    with pytest.raises(TraincastError, match=r"rank 0 of 1 ended early: .*unknown collective 'gossip'"):
        run_ranks(jobs, 1, each=lambda _: None)


def test_no_rank_is_left_when_the_time_is_over():
    begin = time.monotonic()
    run_ranks([{"collective": "all_reduce", "bytes": 8, "seconds": 60.0}], 1, each=lambda _: None, seconds=0.1)
    assert time.monotonic() - begin < 30

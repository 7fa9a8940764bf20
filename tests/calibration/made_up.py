"""A machine whose speed is known: samples of it, for tests of everything that learns from samples."""

from __future__ import annotations

from dataclasses import replace

from traincast.benching.plans import plan
from traincast.calibration.features import Caches
from traincast.calibration.samples import Sample

CACHES = Caches(512e3, 12e6)
IDENTITY = {"device": "cpu", "name": "made up", "threads": 1}


def true_seconds(sample, slowdown=1.0):
    """Ten billion bytes a second from memory, thirty from the L3, a hundred from the L2; 50 Gflop/s; 2 us a call."""
    terms = sample.features(CACHES).terms
    work = terms[4] / 5e10 if sample.features(CACHES).family in ("gemm", "conv") else terms[4] / 4e9
    return slowdown * (2e-6 + terms[1] / 1e11 + terms[2] / 3e10 + terms[3] / 1e10 + work)


def samples(number=600, seed=0):
    made = []
    for task, _ in zip(plan(seed), range(number), strict=False):
        drift = 1.0 + 0.3 * (len(made) % 7) / 7
        bare = Sample(
            signature=task.signature, cold=task.cold, access=task.access, wall=1.0, busy=1.0,
            reference_wall=1e-3 * drift, reference_busy=1e-3 * drift, spread=0.01,
        )  # fmt: skip
        seconds = drift * true_seconds(bare)
        made.append(replace(bare, wall=seconds, busy=seconds))
    return made

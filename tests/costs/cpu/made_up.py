"""A machine whose speed is known: samples of it, for tests of everything that learns from samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.calibration.bench.plans import plan_benchmarks
from traincast.costs.cpu.collectives import CpuCollective, make_collective_signature
from traincast.costs.cpu.features import Caches
from traincast.costs.cpu.samples import Sample

CACHES = Caches(512e3, 12e6)
REFERENCE = 1e-3
IDENTITY = {"device": "cpu", "name": "made up", "threads": 1}


def true_seconds(sample, slowdown=1.0):
    """Ten billion bytes per second from memory, thirty from the L3, a hundred from the L2; 50 Gflop/s; 2 us per
    call."""
    terms = sample.features(CACHES).terms
    work = terms[6] / 5e10 if sample.features(CACHES).family in ("gemm", "conv") else terms[6] / 4e9
    return slowdown * (2e-6 + terms[1] / 1e11 + terms[2] / 3e10 + terms[3] / 1e10 + work)


def samples(number=600, seed=0):
    made = []
    for task, _ in zip(plan_benchmarks(seed), range(number), strict=False):
        drift = 1.0 + 0.3 * (len(made) % 7) / 7
        bare = Sample(
            signature=task.signature, between=task.between, access=task.access, wall=1.0, busy=1.0,
            reference_wall=1e-3 * drift, reference_busy=1e-3 * drift, spread=0.01,
        )  # fmt: skip
        seconds = drift * true_seconds(bare)
        made.append(replace(bare, wall=seconds, busy=seconds))
    return made


def exchange_seconds(exchanges):
    """200 us per call and 2 GB/s, on a machine that drifts."""
    sent = [sum(exchange.sent) - exchange.sent[rank] for rank, exchange in enumerate(exchanges) if exchange.sent]
    return 2e-4 + (sum(sent) if sent else exchanges[0].message_bytes) / 2e9


def exchange_sample(exchanges, drift=1.0, spread=0.05):
    seconds = drift * exchange_seconds(exchanges)
    return Sample(
        signature=make_collective_signature(exchanges), between=0, access="", wall=seconds, busy=0.5 * seconds,
        reference_wall=drift * REFERENCE, reference_busy=drift * REFERENCE, spread=spread, ranks=len(exchanges),
    )  # fmt: skip


def exchange_samples(kind="all_reduce", number=30):
    random = np.random.default_rng(0)
    sizes = [4 * int(2 ** random.uniform(10, 22)) for _ in range(number)]
    if kind == "all_to_all_v":
        rows = [
            [CpuCollective(kind, size, (size, size)), CpuCollective(kind, size, (2 * size, 2 * size))] for size in sizes
        ]
    else:
        rows = [[CpuCollective(kind, size)] * 2 for size in sizes]
    return [exchange_sample(row, drift=1 + 0.1 * (number % 4)) for number, row in enumerate(rows)]

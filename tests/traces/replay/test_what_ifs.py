"""Gains of what-ifs on traces of simulated runs whose true gains are known."""

from __future__ import annotations

import pytest

from tests.traces.replay.simulated import Call, Run
from tests.traces.timelines import linked
from traincast.traces.replay.path import make_path_report
from traincast.traces.replay.steps import simulate_replay
from traincast.traces.replay.timeline import make_timeline_instructions

GEMM, RELU, NORM, NCCL = "sgemm_128x64", "vectorized_elementwise_kernel", "layer_norm_kernel", "ncclKernel_AllReduce"
FAMILY = {GEMM: "gemm", RELU: "elementwise", NORM: "norm", NCCL: "communication", "host": "host"}


def calls(work, *lengths, times=1, **options):
    """A call per kernel of each of gemm, elementwise and norm, of these lengths."""
    names = zip((GEMM, RELU, NORM), lengths, strict=False)
    return tuple(Call(work, ((name, length),), **options) for name, length in names) * times


SYNC = Call(5.0, ())
LOOKUP = Call(8.0, ((NCCL, 900.0),), op="c10d::all_reduce", stream=20, waits_for=8)
RUNS = {
    "host bound": (Run(calls(30.0, 12.0, 4.0, 6.0, times=40)), 3, 4),
    "host bound, nearly not": (Run(calls(14.0, 30.0, 8.0, 10.0, times=40)), 3, 4),
    "device bound, the queue fills up": (Run(calls(6.0, 60.0, 20.0, 30.0, times=40)), 2, 4),
    "queue full": (Run(calls(6.0, 60.0, 20.0, 30.0, times=60), depth=1024), 30, 4),
    "queue full from the first call on": (Run(calls(3.0, 80.0, 9.0, 30.0, times=200), depth=1000), 12, 3),
    "a synchronisation a step": (Run((*calls(10.0, 40.0, 20.0, 30.0, times=30), SYNC)), 3, 3),
    "two streams": (
        Run((
            *calls(8.0, 50.0, 10.0, 20.0, times=10), *calls(8.0, 45.0, 10.0, 15.0, times=8, stream=9),
            Call(8.0, ((NORM, 25.0),), waits_for=53), SYNC,
        )), 3, 3,
    ),
    "graphs": (Run((*calls(10.0, 30.0), Call(20.0, ((GEMM, 40.0), (RELU, 15.0)) * 20, late=12.0))), 3, 4),
    "graphs, host bound": (Run((*calls(400.0, 30.0), Call(900.0, ((GEMM, 10.0), (RELU, 5.0)) * 10))), 3, 4),
    "a collective alongside the backward pass": (
        Run((*calls(9.0, 40.0, 20.0, 30.0, times=3), LOOKUP, *calls(9.0, 40.0, 10.0, 30.0, times=6),
             Call(9.0, ((RELU, 12.0),), waits_for=9))), 3, 4,
    ),
    "an exposed collective": (
        Run((*calls(9.0, 40.0, 20.0, 30.0, times=3), LOOKUP, Call(9.0, ((RELU, 12.0),), waits_for=9), SYNC)), 3, 4,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(RUNS))
def traced(request, tmp_path_factory):
    """A run, its trace and the report of that."""
    run, first, count = RUNS[request.param]
    tied = linked(tmp_path_factory.mktemp("run"), run.trace(first, count))
    return run, tied, make_path_report(0, tied, make_timeline_instructions(tied))


def test_gains_are_the_true_ones_wherever_the_step_is_bound(traced):
    run, _, path = traced

    kernels = {name for call in run.calls for name, _ in call.kernels}
    for what in ("host", *kernels):
        true = run.gain(what)
        assert path.faster[FAMILY[what]] == pytest.approx(true, rel=0.02, abs=0.002), what
    assert 1e6 * path.steady == pytest.approx(run.step_us(), rel=0.01)


def test_simulated_steps_replay_as_they_were(traced):
    _, tied, _ = traced

    replayed = simulate_replay(tied, make_timeline_instructions(tied))

    assert [step.simulated for step in replayed.steps] == pytest.approx(
        [step.measured for step in replayed.steps], rel=5e-3
    )


def test_the_family_with_most_of_the_path_gains_most(traced):
    _, _, path = traced

    families = [name for name in path.by_what if name in FAMILY.values() and name != "host"]
    if families:
        assert path.faster[families[0]] == pytest.approx(max(path.faster[name] for name in families), rel=0.02)

"""Steps that nothing marks, told by the sequence of kernels; times are microseconds."""

from __future__ import annotations

import random

import pytest

from tests.traces.timelines import event, kernel, launch, linked, write_trace
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.markers import find_periodic_rows
from traincast.traces.replay.analysis import analyse_traces

LAYERS, STEP_US = 20, 1000.0


def run(names, pauses=()):
    """Ops of 10 us with one kernel each, one after the other; the host waits 500 us before those in `pauses`."""
    at, events = 0, []
    for number, name in enumerate(names):
        at += 500 if number in pauses else 0
        events += [
            event("cpu_op", f"aten::{name}", at, 9),
            launch(number + 1, at + 1),
            kernel(number + 1, at + 8, 5, name=name),
        ]
        at += 10
    return events


def steps(count):
    return (["embed"] + ["gemm", "norm"] * LAYERS + ["head"]) * count


def test_a_step_is_what_comes_again_whole_and_not_a_layer(tmp_path):
    length = 2 * LAYERS + 2
    tied = linked(tmp_path, run(steps(5), pauses=range(0, 5 * length, length)))

    assert (tied.marked, tied.period) == (True, length)
    assert [step.seconds for step in tied.steps] == pytest.approx([1e-6 * (500 + 10 * length)] * 3)
    assert tied.get_name(int(tied.scopes[tied.step[tied.scopes] == 0][0])) == "aten::embed"  # after the pause


def test_kernels_that_come_once_at_the_begin_do_not_hide_it(tmp_path):
    tied = linked(tmp_path, run(["warm_up", *steps(6)]))

    assert tied.period == 2 * LAYERS + 2


@pytest.mark.parametrize("names", [steps(2), ["gemm", "norm"] * 3, random.Random(3).choices("abcdefgh", k=400)])
def test_too_few_steps_a_short_loop_and_disorder_have_no_period(tmp_path, names):
    tied = linked(tmp_path, run(names))

    assert (tied.marked, tied.period, len(tied.steps)) == (False, 0, 1)


def test_a_marker_wins_over_the_sequence(tmp_path):
    marks = [event("user_annotation", f"ProfilerStep#{n}", STEP_US * n, STEP_US) for n in range(2)]

    tied = linked(tmp_path, [*run(steps(5)), *marks])

    assert (tied.period, [step.seconds for step in tied.steps]) == (0, pytest.approx([1e-3, 1e-3]))


def test_the_page_says_how_steps_were_told(tmp_path):
    (rank,) = analyse_traces([write_trace(tmp_path / "t.json", run(steps(5)))]).ranks

    assert any("told by the sequence of kernels, which comes again after 42" in note for note in rank.notes)
    assert [abs(step.error) for step in rank.replay.steps] == pytest.approx([0.0] * len(rank.steps), abs=0.02)


@pytest.mark.parametrize("file", ["hta_recsys_a100_rank3of8/kineto_rank3", "hta_cuda_graph_a100/kineto_rank0of16"])
def test_steps_of_public_traces_are_as_long_as_between_their_markers(shared_data, file):

    tied = link_trace(read_kineto(shared_data / f"traces/{file}.json.gz"))
    rows, _ = find_periodic_rows(tied.trace, tied.thread, tied.scope, tied.launch)

    starts = tied.events["start"][rows]
    lengths = sorted(1e-9 * (starts[1:] - starts[:-1]))
    marked = sorted(step.seconds for step in tied.steps)
    assert lengths[len(lengths) // 2] == pytest.approx(marked[len(marked) // 2], rel=0.02)

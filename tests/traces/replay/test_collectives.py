"""Traced collectives as ops of a workload, and how many bytes they are."""

from __future__ import annotations

import pytest

from tests.traces.timelines import write_two_ranks
from traincast.traces.collectives import Collective, Match
from traincast.traces.replay.analysis import analyse_traces
from traincast.traces.replay.together import compute_message_bytes
from traincast.traces.replay.workload import find_world_size, make_collective_ops


def call(kind, sent, received=-1, **more):
    return Collective(
        row=0, kind=kind, seconds=1e-5, step=0, stream=20, message_bytes=sent, output_bytes=received, **more
    )


def match(*calls):
    return Match(members=tuple(range(len(calls))), calls=calls)


@pytest.mark.parametrize(
    ("calls", "nbytes"),
    [
        ([call("all_reduce", 4096)], 4096),
        ([call("all_reduce", -1)], -1),  # the trace does not say
        ([call("all_gather", 1024, 4096)], 4096),  # the gathered output
        ([call("all_gather", 1024)], 4096),  # four ranks' parts, where only the input is known
        ([call("all_gather", -1)], -1),
        ([call("reduce_scatter", 4096, 1024)], 4096),
        ([call("all_to_all", 300)], 300),
        ([call("unheard_of", 7)], 7),
    ],
)
def test_the_size_of_a_collective_of_four_ranks(calls, nbytes):
    assert compute_message_bytes(match(*calls), 4) == nbytes


def test_an_uneven_exchange_counts_as_the_even_one_that_takes_as_long():
    calls = [call("all_to_all", 400, in_splits=(1, 3)), call("all_to_all", 400, in_splits=(2, 2))]

    # rank 0 sends 300 bytes to rank 1, which is what an even exchange of 600 would
    assert compute_message_bytes(match(*calls), 2) == 600


def test_the_kind_and_the_transfer_are_those_of_the_rank_that_came_last():
    both = match(call("all_reduce", 8), Collective(row=1, kind="all_reduce", seconds=3e-6, step=0, stream=20))

    assert both.kind == "all_reduce"
    assert both.seconds == 3e-6


def test_the_ops_of_two_ranks_name_their_group(tmp_path):
    report = analyse_traces([write_two_ranks(tmp_path)])

    ops, notes = make_collective_ops(report, find_world_size(report), 3)

    assert notes == []
    for signatures in ops:
        (signature,) = signatures.values()
        assert signature.name == "c10d::allreduce_"
        assert signature.scalar("collective") == "all_reduce"
        assert signature.scalar("group") == (0, 1)
        assert signature.scalar("bytes") == 4096


def test_a_step_that_was_not_traced_has_no_collectives(tmp_path):
    report = analyse_traces([write_two_ranks(tmp_path)])

    assert make_collective_ops(report, 2, 99) == ([{}, {}], [])


def test_ranks_that_were_not_traced_are_taken_to_do_the_same(tmp_path):
    report = analyse_traces([write_two_ranks(tmp_path)])

    _, notes = make_collective_ops(report, 8, 3)

    assert notes == ["2 of 8 ranks were traced; the others are taken to run the same"]

"""The simulation over ranks against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.instructions import host, launch, rank_group_of, record, sync_stream, wait
from tests.simulator.test_ranks_properties import as_collectives, simulate_apart
from traincast.simulator.many_ranks import Deadlock, simulate_ranks
from traincast.simulator.timeline import find_critical_path


def kernels(simulations):
    """Start and end of every kernel, by rank."""
    traces = [simulation.times(row) for simulation in simulations for row in range(simulation.group.size)]
    return [list(zip(t.kernel_start.tolist(), t.kernel_end.tolist(), strict=True)) for t in traces]


def test_a_collective_ends_on_all_ranks_when_the_last_has_come():
    ranks = [[launch(2), launch(0, stream=1)], [host(7), launch(0, stream=1)]]

    simulations = simulate_apart(ranks, [([(0, 1), (1, 1)], 3.0)])

    assert kernels(simulations) == [[(0, 2), (0, 10)], [(7, 10)]]


def test_what_follows_on_the_stream_waits_and_other_streams_do_not():
    ranks = [[launch(0, stream=1), launch(4), launch(1, stream=1)], [host(5), launch(0, stream=1)]]

    simulations = simulate_apart(ranks, [([(0, 0), (1, 1)], 2.0)])

    assert kernels(simulations) == [[(0, 7), (0, 4), (7, 8)], [(5, 7)]]


def test_a_late_rank_holds_the_host_of_another_that_synchronises():
    ranks = [[launch(0), sync_stream(0), host(1)], [host(6), launch(0)]]

    simulations = simulate_apart(ranks, [([(0, 0), (1, 1)], 2.0)])

    assert simulations[0].latest().tolist() == [9]
    assert simulations[1].latest().tolist() == [8]


def test_independent_communicators_overlap():
    ranks = [[launch(0, stream=1), launch(0, stream=2)], [launch(0, stream=1), launch(0, stream=2)]]

    simulations = simulate_apart(ranks, [([(0, 0), (1, 0)], 5.0), ([(0, 1), (1, 1)], 3.0)])

    assert kernels(simulations) == [[(0, 5), (0, 3)]] * 2


def test_messages_in_opposite_directions_pass_each_other():
    # Given two ranks that both send first and then receive, each message on a stream of its own
    ranks = [[launch(0, stream=1), launch(0, stream=2)], [launch(0, stream=1), launch(0, stream=2)]]

    simulations = simulate_apart(ranks, [([(0, 0), (1, 1)], 4.0), ([(1, 0), (0, 1)], 6.0)])

    assert kernels(simulations) == [[(0, 4), (0, 6)], [(0, 6), (0, 4)]]


def test_a_pipeline_of_ranks_with_the_same_instructions():
    # Given ranks that receive, compute and send: each can only start when the one before has sent
    ranks = [[launch(0), launch(3), launch(0)] for _ in range(3)]
    collectives = [([(0, 0)], 0.0), ([(0, 2), (1, 0)], 1.0), ([(1, 2), (2, 0)], 1.0), ([(2, 2)], 0.0)]

    (simulation,) = simulate_ranks([rank_group_of(*ranks)], as_collectives(collectives, lambda rank: (0, rank)))

    assert simulation.latest().tolist() == [4, 8, 11]
    path = find_critical_path([simulation], as_collectives(collectives, lambda r: (0, r)))
    assert [(s.row, s.instruction) for s in path] == [
        (0, 1), (0, 2), (1, 1), (1, 2), (2, 1),
    ]  # fmt: skip


def test_the_path_goes_to_the_rank_that_came_last():
    ranks = [[launch(2), launch(0)], [launch(9), launch(0), launch(1)]]
    collectives = [([(0, 1), (1, 1)], 3.0)]

    path = find_critical_path(simulate_apart(ranks, collectives), as_collectives(collectives))

    assert [(s.group, s.instruction, s.seconds) for s in path] == [(1, 0, 9), (1, 1, 3), (1, 2, 1)]


def test_ranks_that_disagree_on_the_order_are_stuck():
    # Given one stream each, on which the ranks have two collectives in opposite order
    ranks = [[launch(0), launch(0)], [launch(0), launch(0)]]
    collectives = [([(0, 0), (1, 1)], 1.0), ([(0, 1), (1, 0)], 1.0)]

    with pytest.raises(Deadlock) as caught:
        simulate_apart(ranks, collectives)

    entries = as_collectives(collectives)
    found = [(entries.group[w.entry], entries.instruction[w.entry], w.missing) for w in caught.value.waiting]
    assert found == [(0, 0, (1,)), (1, 0, (2,))]


def test_ranks_that_wait_through_events_are_stuck():
    # Given a rank whose second stream waits for its first, and a partner that has them the other way round
    ranks = [
        [launch(0, stream=0), record(0, 0), wait(0, 1), launch(0, stream=1)],
        [launch(0, stream=0), record(0, 0), wait(0, 1), launch(0, stream=1)],
    ]

    with pytest.raises(Deadlock):
        simulate_apart(ranks, [([(0, 0), (1, 3)], 1.0), ([(0, 3), (1, 0)], 1.0)])


def test_walking_on_continues_on_every_rank():
    program = [host(1), launch(0, stream=1), launch(4)]
    collectives = as_collectives([([(0, 1), (1, 1)], 2.0)], lambda rank: (0, rank))
    group = rank_group_of(program, [host(3), *program[1:]])

    (first,) = simulate_ranks([group], collectives)
    (second,) = simulate_ranks([group], collectives, clocks=[first.clocks()])

    assert first.latest().tolist() == [5, 7]
    assert second.times(0).kernel_start.tolist() == [5, 5]
    assert np.all(second.latest() >= first.latest())

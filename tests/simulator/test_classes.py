"""Classes of programs: those who do the same at the same time, and nobody else."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.instructions import launch, rank_group_of
from tests.simulator.test_ranks_properties import RANKS, any_instruction, moments, simulate_apart
from tests.simulator.test_walk_properties import seconds, stream, thread
from traincast.simulator.collective_calls import CollectiveCalls, MatchedCollective, Participant
from traincast.simulator.instructions import find_classes
from traincast.simulator.many_ranks import Collectives, simulate_ranks

# few durations and few groups, so that ranks are often alike
few = st.sampled_from([1.0, 2.0])
step = st.one_of(
    st.tuples(st.sampled_from([(0,), (1,), (2,), (0, 1, 2)]), any_instruction),
    st.tuples(st.sampled_from([((0, 1),), ((0, 1, 2),), ((0, 1), (2,)), ((0,), (1,), (2,))]),
              st.builds(launch, few, stream, seconds, thread)),
)  # fmt: skip


def written(steps):
    """Programs and collectives: local work of some ranks, or groups that meet side by side."""
    ranks, collectives = [[] for _ in range(RANKS)], []
    for who, what in steps:
        if isinstance(who[0], int):
            for rank in who:
                ranks[rank].append(what)
            continue
        for group in who:
            collectives.append(([(rank, len(ranks[rank])) for rank in group], what.kernel))
            for rank in group:
                ranks[rank].append(what)
    return [program or [launch(0.0)] for program in ranks], collectives


def classes_of(ranks, collectives):
    calls = [sorted(i for places, _ in collectives for rank, i in places if rank == own) for own in range(RANKS)]
    made = [
        MatchedCollective("all_reduce", "fp32", tuple(rank for rank, _ in places),
                tuple(Participant(rank, calls[rank].index(i)) for rank, i in places), ())
        for places, _ in collectives
    ]  # fmt: skip
    lasts = np.array([length for _, length in collectives])
    found = [CollectiveCalls(np.array(own, dtype=np.int64), ()) for own in calls]
    return find_classes([tuple(program) for program in ranks], found, made, lasts)


@given(st.lists(step, min_size=1, max_size=15))
@settings(max_examples=300, deadline=None)
def test_a_class_walks_like_each_of_its_ranks(steps):
    ranks, collectives = written(steps)

    classes = classes_of(ranks, collectives)

    entries = [(n, c, 0, i) for n, collective in enumerate(classes.collectives) for c, i in collective.members]
    table = np.array(entries, dtype=np.int64).reshape(-1, 4)
    lasts = np.array([collective.seconds for collective in classes.collectives])
    groups = [rank_group_of(ranks[program]) for program in classes.program]
    once = simulate_ranks(groups, Collectives(*table.T, lasts))
    every = simulate_apart(ranks, collectives)
    for rank in range(RANKS):
        assert moments(once[classes.of[rank]].times(0)) == moments(every[rank].times(0))


def test_equal_ranks_that_meet_are_one_class():
    ranks = [[launch(1.0), launch(2.0)] for _ in range(3)]

    classes = classes_of(ranks, [([(0, 1), (1, 1), (2, 1)], 3.0)])

    assert classes.of == (0, 0, 0)
    assert [collective.members for collective in classes.collectives] == [((0, 1),)]


def test_meeting_somebody_else_makes_a_difference():
    # Given three equal ranks of which two meet and the third meets nobody
    ranks = [[launch(1.0), launch(2.0)] for _ in range(3)]

    assert classes_of(ranks, [([(0, 1), (1, 1)], 3.0), ([(2, 1)], 1.0)]).of == (0, 0, 1)


def test_a_ring_of_messages_is_one_class_that_meets_itself():
    # Given ranks that each send to the next and receive from the one before
    ranks = [[launch(0.0, stream=1), launch(0.0, stream=2)] for _ in range(3)]
    ring = [([(rank, 0), ((rank + 1) % 3, 1)], 2.0) for rank in range(3)]

    classes = classes_of(ranks, ring)

    assert classes.of == (0, 0, 0)
    assert [collective.members for collective in classes.collectives] == [((0, 0), (0, 1))]

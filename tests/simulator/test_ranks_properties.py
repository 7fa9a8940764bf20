"""The simulation over ranks against its definition, and what must hold for every run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.instructions import join, launch, rank_group_of
from tests.simulator.naive import NaiveWalk
from tests.simulator.test_walk_properties import instruction, seconds, stream, thread
from traincast.simulator.many_ranks import Collectives, simulate_ranks
from traincast.simulator.schedule import Code
from traincast.simulator.timeline import find_critical_path

RANKS = 3
any_instruction = st.one_of(instruction, st.builds(join, thread, thread))
group = st.sets(st.integers(0, RANKS - 1), min_size=1).map(sorted)
local = st.tuples(st.integers(0, RANKS - 1), any_instruction)
collective = st.tuples(group, st.builds(launch, seconds, stream, seconds, thread))
# what happens, in an order in which it can happen: a rank does something, or a group meets
runs = st.lists(st.one_of(local, collective), min_size=1, max_size=40)
gaps = st.sampled_from([0.0, 2.0])


def programs_of(run):
    """One program a rank, and the collectives: the first rank of a group says how long the collective takes."""
    ranks, collectives = [[] for _ in range(RANKS)], []
    for who, what in run:
        if isinstance(who, int):
            ranks[who].append(what)
        else:
            collectives.append(([(rank, len(ranks[rank])) for rank in who], what.kernel))
            for rank in who:
                ranks[rank].append(what)
    return [program or [launch(0.0)] for program in ranks], collectives


def as_collectives(collectives, place=lambda rank: (rank, 0)):
    entries = [(m, *place(rank), i) for m, (places, _) in enumerate(collectives) for rank, i in places]
    table = np.array(entries, dtype=np.int64).reshape(-1, 4)
    return Collectives(*table.T, np.array([length for _, length in collectives]))


def simulate_apart(ranks, collectives, gap=0.0):
    """Every rank a rank group of its own."""
    return simulate_ranks([rank_group_of(program) for program in ranks], as_collectives(collectives), gap=gap)


def moments(trace):
    return [getattr(trace, name).tolist() for name in ("host_issue", "host_after", "kernel_start", "kernel_end")]


def naive_moments(naive, rank):
    program = naive.ranks[rank]
    launches = [i for i, own in enumerate(program) if own.code is Code.LAUNCH]
    every = range(len(program))
    return [
        [naive.host_issue(rank, i) for i in every],
        [naive.host_after(rank, i) for i in every],
        [naive.kernel_start(rank, i) for i in launches],
        [naive.kernel_end(rank, i) for i in launches],
    ]


@given(runs, gaps)
@settings(max_examples=300, deadline=None)
def test_the_walk_is_its_definition(run, gap):
    ranks, collectives = programs_of(run)

    simulations = simulate_apart(ranks, collectives, gap)

    naive = NaiveWalk(ranks, collectives, gap)
    for rank in range(RANKS):
        assert moments(simulations[rank].times(0)) == naive_moments(naive, rank)


@given(
    st.lists(st.tuples(any_instruction, st.sampled_from([None, (0, 1, 2), (0, 2)])), min_size=1, max_size=30),
    gaps,
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_ranks_side_by_side_are_ranks_apart(shared, gap, data):
    # Given ranks with the same instructions and durations of their own, some of which meet, the others alone
    ranks = [[replace(i, host=data.draw(seconds), kernel=data.draw(seconds)) for i, _ in shared] for _ in range(RANKS)]
    collectives = []
    for i, (own, members) in enumerate(shared):
        if members and own.code is Code.LAUNCH:
            collectives.append(([(rank, i) for rank in members], own.kernel))
            collectives += [([(rank, i)], own.kernel) for rank in range(RANKS) if rank not in members]

    together = simulate_ranks([rank_group_of(*ranks)], as_collectives(collectives, lambda rank: (0, rank)), gap=gap)
    apart = simulate_apart(ranks, collectives, gap)

    for rank in range(RANKS):
        assert moments(together[0].times(rank)) == moments(apart[rank].times(0))


@given(runs, st.permutations(range(RANKS)))
@settings(max_examples=100, deadline=None)
def test_renaming_ranks_renames_the_answers(run, names):
    ranks, collectives = programs_of(run)
    renamed = [ranks[names.index(rank)] for rank in range(RANKS)]
    moved = [([(names[rank], i) for rank, i in places], length) for places, length in collectives]

    before, after = simulate_apart(ranks, collectives), simulate_apart(renamed, moved)

    for rank in range(RANKS):
        assert moments(before[rank].times(0)) == moments(after[names[rank]].times(0))


@given(runs, st.data())
@settings(max_examples=100, deadline=None)
def test_a_slower_host_never_makes_any_rank_faster(run, data):
    ranks, collectives = programs_of(run)
    slower = [[replace(i, host=i.host + data.draw(st.integers(0, 3))) for i in program] for program in ranks]

    before, after = simulate_apart(ranks, collectives), simulate_apart(slower, collectives)

    for rank in range(RANKS):
        assert after[rank].latest()[0] >= before[rank].latest()[0]


@given(runs, gaps)
@settings(max_examples=200, deadline=None)
def test_the_path_over_ranks_has_no_hole_and_spans_the_run(run, gap):
    ranks, collectives = programs_of(run)
    simulations = simulate_apart(ranks, collectives, gap)

    segments = find_critical_path(simulations, as_collectives(collectives))

    assert sum(s.seconds for s in segments) == max(simulation.latest()[0] for simulation in simulations)
    for before, after in zip(segments, segments[1:], strict=False):
        assert before.end == after.start

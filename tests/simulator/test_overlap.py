"""Kernels beside transfers: how much of each lies there, and how much longer it then takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.instructions import crew_of, launch
from tests.simulator.test_ranks_properties import as_meetings, gaps, moments, programs_of, runs
from traincast.costs.in_step import SHIPPED
from traincast.simulator.overlap import Overlap, covered, late_start, walk_with_overlap
from traincast.simulator.ranks import Agenda, walk_ranks
from traincast.simulator.schedule import Code

moment = st.integers(0, 40)
spans = st.lists(st.tuples(moment, moment).map(sorted), min_size=1, max_size=6)


@given(spans, spans)
def test_covered_time_is_counted_second_by_second(transfers, kernels):
    begin, until = np.array(transfers, dtype=float).T
    start, end = np.array(kernels, dtype=float).T
    # the same row twice, to see that rows do not touch each other
    found = covered(*(np.stack([each, each]) for each in (begin, until, start, end)))

    inside = {second for low, high in transfers for second in range(low, high)}
    expected = [sum(second in inside for second in range(low, high)) for low, high in kernels]
    assert found.tolist() == [pytest.approx(expected)] * 2


def test_only_the_part_beside_the_transfer_counts():
    # Given a collective that waits 6 s for another rank and then takes 4 s, beside kernels of 5 s each
    ms = 1e-3
    early = [launch(0, stream=1), launch(5 * ms), launch(5 * ms), launch(5 * ms)]
    late = [launch(6 * ms), launch(0), launch(0, stream=1), launch(0, stream=1)]
    meetings = as_meetings([([(0, 0), (1, 1)], 4 * ms)])
    walks = walk_ranks([crew_of(early), crew_of(late)], meetings)

    overlap = Overlap(walks[0], 0, meetings)

    extra = (overlap.longer(walks[0]) - overlap.alone)[walks[0].blocks.launch_place, 0]
    assert extra.tolist() == pytest.approx([0, 0, 0.8 * late_start() + SHIPPED.beside * 4 * ms, 0])


@given(runs, gaps)
@settings(max_examples=100, deadline=None)
def test_durations_settle_between_alone_and_all_late(run, gap):
    # Given kernels so short that a late start matters to all that follows
    ranks, meetings = programs_of(run)
    crews = [crew_of(program) for program in ranks]
    for crew in crews:
        crew.kernel_seconds[:] *= 1e-6
        crew.host_seconds[:] *= 1e-6
    meetings = as_meetings([(places, 1e-6 * length) for places, length in meetings])
    agenda = Agenda(crews, meetings)

    alone = walk_ranks(crews, meetings, gap=1e-6 * gap)
    walks = walk_with_overlap(crews, meetings, agenda, None, gap=1e-6 * gap)

    for crew, walk, before in zip(crews, walks, alone, strict=True):
        extra = (
            walk.kernel_seconds[walk.blocks.launch_place, 0] - crew.kernel_seconds[0, crew.schedule.code == Code.LAUNCH]
        )
        alone_seconds = crew.kernel_seconds[0, crew.schedule.code == Code.LAUNCH]
        assert np.all((extra >= 0) & (extra <= (late_start() + SHIPPED.beside * alone_seconds) * (1 + 1e-9)))
        assert walk.latest()[0] >= before.latest()[0] - 1e-15
    # and what was taken over from walk to walk is what a walk from scratch finds
    scratch = walk_ranks(crews, meetings, gap=1e-6 * gap, kernel_seconds=[walk.kernel_seconds for walk in walks])
    for walk, other in zip(walks, scratch, strict=True):
        assert moments(walk.times(0)) == moments(other.times(0))

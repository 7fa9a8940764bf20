"""Kernels alongside transfers: how much of each is there, and how much longer it then takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.instructions import launch, rank_group_of
from tests.simulator.test_ranks_properties import as_collectives, gaps, moments, programs_of, runs
from traincast.costs.in_step import SHIPPED
from traincast.simulator.many_ranks import Clocks, CollectiveIndex, Collectives, simulate_ranks
from traincast.simulator.overlap import Overlap, compute_covered_seconds, get_late_start_seconds, simulate_with_overlap
from traincast.simulator.schedule import Code

moment = st.integers(0, 40)
spans = st.lists(st.tuples(moment, moment).map(sorted), min_size=1, max_size=6)


@given(spans, spans)
def test_covered_time_is_counted_second_by_second(transfers, kernels):
    begin, until = np.array(transfers, dtype=float).T
    start, end = np.array(kernels, dtype=float).T
    # the same row twice, to see that rows do not touch each other
    found = compute_covered_seconds(*(np.stack([each, each]) for each in (begin, until, start, end)))

    inside = {second for low, high in transfers for second in range(low, high)}
    expected = [sum(second in inside for second in range(low, high)) for low, high in kernels]
    assert found.tolist() == [pytest.approx(expected)] * 2


def test_only_the_part_beside_the_transfer_counts():
    # Given a collective that waits 6 s for another rank and then takes 4 s, alongside kernels of 5 s each
    ms = 1e-3
    early = [launch(0, stream=1), launch(5 * ms), launch(5 * ms), launch(5 * ms)]
    late = [launch(6 * ms), launch(0), launch(0, stream=1), launch(0, stream=1)]
    collectives = as_collectives([([(0, 0), (1, 1)], 4 * ms)])
    simulations = simulate_ranks([rank_group_of(early), rank_group_of(late)], collectives)

    overlap = Overlap(simulations[0], 0, collectives, None)

    extra = (overlap.longer(simulations[0]) - overlap.alone)[simulations[0].blocks.launch_place, 0]
    assert extra.tolist() == pytest.approx([0, 0, 0.8 * get_late_start_seconds() + SHIPPED.beside * 4 * ms, 0])


@pytest.mark.parametrize("fill", [3e-3, 20e-3])
def test_kernels_wait_while_a_cache_is_filled(fill):
    # Given a kernel that fills a cache from host memory, alongside four of 5 ms on another stream
    ms = 1e-3
    program = [launch(5 * ms), launch(fill, stream=1), launch(5 * ms), launch(5 * ms), launch(5 * ms)]
    group = replace(rank_group_of(program), fills=np.array([1]))

    # When the step is simulated
    (simulation,) = simulate_with_overlap(
        [group], Collectives.none(), CollectiveIndex([group], Collectives.none()), None, gap=0
    )

    # Then all of it takes as long as one after the other, and only the first kernel waits
    lengths = (simulation.ends - simulation.starts)[simulation.blocks.launch_place, 0]
    assert simulation.latest().max() == pytest.approx(20 * ms + fill)
    assert lengths.tolist() == pytest.approx([5 * ms + fill, fill, 5 * ms, 5 * ms, 5 * ms])


def test_a_fill_behind_the_step_before_takes_its_time_all_the_same():
    ms = 1e-3
    program = [launch(1 * ms), launch(4 * ms, stream=1), launch(5 * ms)]
    group = replace(rank_group_of(program), fills=np.array([1]))
    index = CollectiveIndex([group], Collectives.none())
    # Given a stream that is busy for 10 ms with the step before, when a fill runs from 0 to 4 ms
    clocks = [[Clocks([0.0] * group.schedule.num_threads, [10 * ms, 0.0])]]

    (simulation,) = simulate_with_overlap([group], Collectives.none(), index, clocks, gap=0)

    # Then the stream is done with both steps 4 ms later
    assert simulation.latest().max() == pytest.approx((10 + 1 + 5 + 4) * ms)


@given(runs, gaps)
@settings(max_examples=100, deadline=None)
def test_durations_settle_between_alone_and_all_late(run, gap):
    # Given kernels so short that a late start matters to all that follows
    ranks, collectives = programs_of(run)
    groups = [rank_group_of(program) for program in ranks]
    for group in groups:
        group.kernel_seconds[:] *= 1e-6
        group.host_seconds[:] *= 1e-6
    collectives = as_collectives([(places, 1e-6 * length) for places, length in collectives])
    agenda = CollectiveIndex(groups, collectives)

    alone = simulate_ranks(groups, collectives, gap=1e-6 * gap)
    simulations = simulate_with_overlap(groups, collectives, agenda, None, gap=1e-6 * gap)

    for group, simulation, before in zip(groups, simulations, alone, strict=True):
        extra = (
            simulation.kernel_seconds[simulation.blocks.launch_place, 0]
            - group.kernel_seconds[0, group.schedule.code == Code.LAUNCH]
        )
        alone_seconds = group.kernel_seconds[0, group.schedule.code == Code.LAUNCH]
        assert np.all(
            (extra >= 0) & (extra <= (get_late_start_seconds() + SHIPPED.beside * alone_seconds) * (1 + 1e-9))
        )
        assert simulation.latest()[0] >= before.latest()[0] - 1e-15
    # and what was taken over from simulation to simulation is what a simulation from scratch finds
    scratch = simulate_ranks(
        groups, collectives, gap=1e-6 * gap, kernel_seconds=[simulation.kernel_seconds for simulation in simulations]
    )
    for simulation, other in zip(simulations, scratch, strict=True):
        assert moments(simulation.times(0)) == moments(other.times(0))

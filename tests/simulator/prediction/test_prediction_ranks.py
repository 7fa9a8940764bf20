"""Predictions of steps on several ranks: who waits for whom, and what must hold whatever the models say."""

from __future__ import annotations

from dataclasses import replace

import pytest

import traincast
from tests.simulator.rank_programs import MB, RankProgram, predict, workload
from traincast.costs.in_step import SHIPPED
from traincast.hardware import load_platform
from traincast.simulator.overlap import get_late_start_seconds
from traincast.simulator.prediction.prediction import predict_step
from traincast.simulator.prediction.rank_results import sum_path_by_place
from traincast.simulator.prediction.step import Unevenness
from traincast.utils.errors import TraincastError

WORLD = tuple(range(8))


def layers(world=WORLD, size=2048):
    """Two GEMMs whose results are summed while the next two run."""
    return RankProgram().compute(size, 2).collective(group=world, wait=False).compute(size, 2).collective(group=world)


def test_ranks_with_one_program_are_one_answer():
    result = predict(layers(), ranks=(0,) * 8)

    assert result.gpus == 8
    assert [rank.ranks for rank in result.ranks] == [WORLD]
    assert result.imbalance == 0
    assert result.ranks[0].waiting == pytest.approx(0, abs=1e-12)


def test_equal_programs_of_several_ranks_give_the_answer_of_one_program():
    once = predict(layers(), ranks=(0,) * 8)
    apart = predict(*[layers() for _ in WORLD])

    assert apart.iteration == once.iteration
    assert len(apart.ranks) == 1
    assert apart.ranks[0].ranks == WORLD


def test_groups_that_do_the_same_apart_are_one_class():
    # Given four ranks in two groups of two, each with a communicator of its own
    pairs = [layers((0, 1)), layers((0, 1)), layers((2, 3)), layers((2, 3))]

    result = predict(*pairs)

    assert len(result.ranks) == 1
    assert result.iteration == predict(layers((0, 1)), ranks=(0, 0)).iteration


def test_the_other_group_of_a_rank_tells_it_apart():
    # Given three ranks: 0 and 1 meet, then 1 and 2
    def rank(*groups, size=1024):
        program = RankProgram()
        for group in groups:
            program.compute(size).collective(group=group, communicator=group[0])
        return program

    result = predict(rank((0, 1)), rank((0, 1), (1, 2)), rank((1, 2)))

    assert sorted(each.ranks for each in result.ranks) == [(0,), (1,), (2,)]


def test_a_slow_rank_makes_the_others_wait():
    quick, slow = layers((0, 1)), layers((0, 1), size=4096)

    result = predict(quick, slow)

    first, second = result.ranks
    assert first.waiting > 0.5 * (second.compute - first.compute)
    assert second.waiting == pytest.approx(0, abs=1e-9)
    assert first.exposed_comm > second.exposed_comm
    assert result.imbalance == pytest.approx(second.compute / ((first.compute + second.compute) / 2) - 1)
    assert first.iteration == pytest.approx(second.iteration, rel=0.01)


def test_the_path_lies_on_the_rank_that_holds_the_step_back():
    result = predict(layers((0, 1)), layers((0, 1), size=4096))

    (rank, op), _ = next(iter(sum_path_by_place(result.path).items()))
    assert (rank, op) == (1, "aten::mm")
    assert sum(part.seconds for part in result.path) == pytest.approx(result.iteration)


def test_exposed_communication_is_what_computing_does_not_hide():
    hidden = RankProgram().collective(nbytes=64 * MB, wait=False).compute(4096, 8)
    shown = RankProgram().collective(nbytes=64 * MB).compute(4096, 8)

    hidden, shown = (predict(program, ranks=(0, 0)) for program in (hidden, shown))

    assert hidden.exposed_comm < 0.1 * shown.exposed_comm
    assert hidden.iteration < shown.iteration


def test_kernels_beside_a_transfer_take_longer():
    beside = RankProgram().collective(nbytes=1024 * MB, wait=False).compute(2048, 3)
    after = RankProgram().collective(nbytes=1024 * MB).compute(2048, 3)

    beside, after = predict(beside, ranks=(0, 0)), predict(after, ranks=(0, 0))

    gemms = after.by_family["gemm"]
    assert beside.by_family["gemm"] - gemms == pytest.approx(
        3 * get_late_start_seconds() + SHIPPED.beside * gemms, rel=0.02
    )


def test_a_rank_that_waits_in_a_collective_is_not_slowed_down():
    # Given a rank that computes while its collective waits for another one
    early = RankProgram().collective(nbytes=MB, wait=False).compute(2048, 3)
    late = RankProgram().compute(2048, 9).collective(nbytes=MB)

    result = predict(early, late)
    alone = predict(RankProgram().compute(2048, 3))

    assert result.ranks[0].compute == pytest.approx(alone.device_active, rel=1e-3)


def test_more_nodes_take_longer():
    small = predict(layers(tuple(range(8))), ranks=(0,) * 8)
    large = predict(layers(tuple(range(16))), ranks=(0,) * 16)

    assert large.by_family["collective"] > 1.2 * small.by_family["collective"]


def test_steps_that_run_into_each_other():
    apart = predict(layers((0, 1)), layers((0, 1), size=4096), synchronised=True)
    running = predict(layers((0, 1)), layers((0, 1), size=4096), synchronised=False)

    assert 0.9 * apart.iteration < running.iteration <= apart.iteration


def test_the_interval_knows_the_spread_of_collectives():
    program = RankProgram().compute(256).collective(nbytes=512 * MB)
    result = predict(program, ranks=(0,) * 2, on="dgx-h100")

    assert result.by_family["collective"] > 0.9 * result.iteration
    assert result.interval[0] < 0.99 * result.iteration
    assert result.interval[1] > 1.01 * result.iteration


def test_uneven_exchanges_last_as_long_as_the_busiest_rank():
    def program(sends, receives):
        return RankProgram().collective(
            "all_to_all_v", sum(sends), (0, 1), send_splits=tuple(sends), recv_splits=tuple(receives)
        )

    def even(size):
        return RankProgram().collective("all_to_all", 2 * size, (0, 1))

    uneven = predict(program([0, 64 * MB], [0, 4 * MB]), program([4 * MB, 0], [64 * MB, 0]))
    largest, smallest = (predict(even(size), ranks=(0, 0)) for size in (64 * MB, 4 * MB))

    assert uneven.by_family["collective"] == pytest.approx(largest.by_family["collective"], rel=0.02)
    assert uneven.by_family["collective"] > 2 * smallest.by_family["collective"]


def test_a_rank_whose_own_part_is_even_meets_one_whose_part_is_not():
    a = RankProgram().collective("all_to_all", 3 * MB, (0, 1, 2))
    sends, receives = (MB, 0, 2 * MB), (MB, 0, 5 * MB)
    b = RankProgram().collective("all_to_all_v", 3 * MB, (0, 1, 2), send_splits=sends, recv_splits=receives)
    c = RankProgram().collective(
        "all_to_all_v", 7 * MB, (0, 1, 2), send_splits=(MB, 5 * MB, MB), recv_splits=(MB, 2 * MB, MB)
    )

    assert predict(a, b, c).iteration > 0


def test_without_links_several_ranks_are_refused():
    platform = replace(load_platform("a100-80gb"), topology=None)

    with pytest.raises(TraincastError, match="links"):
        predict_step(workload(layers((0, 1)), ranks=(0, 0)), platform)


@pytest.mark.parametrize(
    "uneven", [Unevenness(jitter=0.05), Unevenness(skew_ms=2.0), Unevenness(skew_ms=1, jitter=0.1)]
)
def test_unevenness_only_delays_and_is_the_same_every_time(uneven):
    plain = predict(layers(), ranks=(0,) * 8)

    results = [predict(layers(), ranks=(0,) * 8, uneven=uneven) for _ in range(2)]

    assert len(results[0].ranks) == 8
    assert results[0].iteration == results[1].iteration > plain.iteration
    assert sum(rank.waiting for rank in results[0].ranks) > 0


def test_negative_jitter_is_refused():
    with pytest.raises(TraincastError, match="negative"):
        Unevenness(jitter=-0.1)


def test_no_rank_takes_longer_than_the_step():
    # Given ranks whose unequal tables put them now ahead, now behind, in steps that run into each other
    result = traincast.predict("dlrm-v2", on="pcie-h100-nvl", gpus=4, batch_size=2048)

    assert len(result.ranks) > 1
    assert all(rank.iteration <= result.iteration for rank in result.ranks)
    assert all(rank.compute <= rank.device_active <= rank.iteration for rank in result.ranks)

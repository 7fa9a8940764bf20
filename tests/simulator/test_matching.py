"""Ranks that do not agree on their collectives: rejected, naming ranks and ops."""

from __future__ import annotations

import pytest

from tests.simulator.rank_programs import MB, RankProgram, predict
from traincast.utils.errors import TraincastError


def refusal(*programs, ranks=None):
    with pytest.raises(TraincastError) as caught:
        predict(*programs, ranks=ranks)
    return str(caught.value)


def test_other_kinds_at_the_same_time():
    a = RankProgram().collective("all_reduce", module="dense").collective("all_gather")
    b = RankProgram().collective("all_gather").collective("all_reduce", module="dense")

    text = refusal(a, b)

    assert "rank 0 calls c10d::allreduce_ (op 2 of dense) while rank 1 calls c10d::allreduce_ (op 2)" in text
    assert "all_reduce meets all_gather" in text
    assert "same order" in text


def test_other_sizes():
    text = refusal(RankProgram().collective(nbytes=8), RankProgram().compute(64).collective(nbytes=16))

    assert "rank 0 calls c10d::allreduce_ (op 2) while rank 1 calls c10d::allreduce_ (op 3)" in text
    assert "8 and 16 bytes" in text


def test_several_ranks_that_disagree():
    a, b = (
        RankProgram().collective(nbytes=8, group=(0, 1, 2, 3)),
        RankProgram().collective(nbytes=16, group=(0, 1, 2, 3)),
    )

    text = refusal(a, b, ranks=(0, 1, 0, 1))

    assert "ranks 0, 2 call c10d::allreduce_ (op 2) while ranks 1, 3 call c10d::allreduce_ (op 2)" in text


def test_several_ranks_that_never_come():
    a, b = RankProgram().collective(group=(0, 1, 2, 3)), RankProgram().compute(64)

    text = refusal(a, b, ranks=(0, 0, 1, 1))

    assert text.startswith(
        "ranks 2, 3 never take part in the group of ranks 0 to 3 (communicator 0), where ranks 0, 1 at"
    )
    assert text.endswith("wait for ever")


def test_other_roots():
    text = refusal(RankProgram().collective("broadcast", root=0), RankProgram().collective("broadcast", root=1))

    assert "roots are 0 and 1" in text


def test_a_rank_that_never_comes():
    a = RankProgram().collective(group=(0, 1, 2), module="top")

    text = refusal(a, a, RankProgram().compute(64))

    assert text.startswith("rank 2 never takes part in the group of ranks 0 to 2 (communicator 0)")
    assert "ranks 0, 1 at c10d::allreduce_ (op 2 of top)" in text or "rank 0 at" in text


def test_a_rank_that_comes_less_often():
    text = refusal(RankProgram().collective().collective(module="last"), RankProgram().collective())

    assert "rank 0 makes 2 calls" in text
    assert "rank 1 only 1" in text
    assert "op 7 of last" in text


def test_a_rank_outside_the_group():
    text = refusal(RankProgram().collective(group=(0, 1)), ranks=(0, 0, 0))

    assert "rank 2 calls c10d::allreduce_ (op 2)" in text
    assert "without belonging to it" in text


def test_a_group_larger_than_the_world():
    assert "rank 5, but there are 2 ranks" in refusal(RankProgram().collective(group=(0, 5)), ranks=(0, 0))


def test_splits_that_do_not_fit():
    a = RankProgram().collective("all_to_all_v", 3 * MB, send_splits=(MB, 2 * MB), recv_splits=(MB, MB))
    b = RankProgram().collective("all_to_all_v", 2 * MB, send_splits=(MB, MB), recv_splits=(MB, MB))

    text = refusal(a, b)

    assert f"rank 0 sends {2 * MB} bytes to rank 1, which expects {MB}" in text
    assert "c10d::allreduce_ (op 2)" in text


def test_splits_that_differ_by_chance_are_taken_at_their_mean_with_a_wider_interval():
    def exchanged(sent: int) -> object:
        a = RankProgram().collective("all_to_all_v", MB + sent, send_splits=(MB, sent), recv_splits=(MB, MB))
        b = RankProgram().collective("all_to_all_v", 2 * MB, send_splits=(MB, MB), recv_splits=(MB, MB))
        return predict(a, b)

    agreed, differing = exchanged(MB), exchanged(MB * 104 // 100)

    assert agreed.iteration < differing.iteration < agreed.iteration * 1.04
    assert differing.interval[1] - differing.interval[0] > agreed.interval[1] - agreed.interval[0]


def test_splits_of_another_length():
    assert "one size for each of the 2 ranks" in refusal(
        RankProgram().collective("all_to_all_v", 4, send_splits=(1, 1, 2), recv_splits=(1, 1, 2)), ranks=(0, 0)
    )


def test_uneven_sizes_without_splits():
    assert "send_splits" in refusal(RankProgram().collective("all_to_all_v", 4), ranks=(0, 0))


def test_even_exchanges_of_other_sizes():
    text = refusal(RankProgram().collective("all_to_all", 2 * MB), RankProgram().collective("all_to_all", 4 * MB))

    assert f"sends {MB} bytes to rank 1, which expects {2 * MB}" in text


def test_a_rank_named_twice():
    assert "twice" in refusal(RankProgram().collective(group=(0, 1, 1)), ranks=(0, 0))


def test_communicators_in_another_order_on_one_stream():
    # Given two communicators whose collectives wait for each other through stream 0, in opposite order
    a = RankProgram().collective(communicator=1, stream=1).collective(communicator=2, stream=2, module="second")
    b = RankProgram().collective(communicator=2, stream=2, module="second").collective(communicator=1, stream=1)

    text = refusal(a, b)

    assert "disagree on the order" in text
    assert "rank 0 at c10d::allreduce_ (op 2) waits for rank 1 at c10d::allreduce_ (op 7)" in text


def test_communicators_in_another_order_on_streams_of_their_own_pass():
    a = RankProgram().collective(communicator=1, stream=1, wait=False).collective(communicator=2, stream=2, wait=False)
    b = RankProgram().collective(communicator=2, stream=2, wait=False).collective(communicator=1, stream=1, wait=False)

    assert predict(a, b).iteration > 0


def test_two_sends_that_wait_for_each_other():
    # Given two ranks that send before they receive on the one stream of their pair
    def rank(me, other):
        ends = [{"source": me, "target": other}, {"source": other, "target": me}]
        program = RankProgram()
        for each in ends:
            program.collective("send_recv", MB, (0, 1), **each)
        return program

    assert "rank 0 at" in refusal(rank(0, 1), rank(1, 0))


def test_a_message_meets_its_receiver():
    ends = {"source": 1, "target": 0}
    receive = RankProgram().collective("send_recv", MB, (0, 1), **ends)
    send = RankProgram().compute(2048).collective("send_recv", MB, (0, 1), **ends)

    result = predict(receive, send)

    assert result.ranks[0].waiting > 0
    assert result.ranks[1].waiting == pytest.approx(0, abs=1e-12)


def test_a_message_of_another_size():
    ends = {"source": 1, "target": 0}
    text = refusal(
        RankProgram().collective("send_recv", MB, (0, 1), **ends),
        RankProgram().collective("send_recv", 2 * MB, (0, 1), **ends),
    )

    assert "messages from rank 1 to rank 0" in text
    assert f"{MB} and {2 * MB} bytes" in text

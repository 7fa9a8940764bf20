"""Orders of micro-batches: complete, feasible, and with the memory that their papers say."""

from __future__ import annotations

import pytest

from traincast.simulator.parallelism.snippets import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    order_1f1b,
    order_interleaved,
    order_zero_bubble,
    split_layers_into_parts,
)


def orders(kind: str, stages: int, chunks: int, micro_batches: int):
    if kind == "zero-bubble":
        return order_zero_bubble([1.0] * stages, [1.0] * stages, [1.0] * stages, micro_batches)
    if kind == "interleaved":
        return [order_interleaved(stage, stages, chunks, micro_batches) for stage in range(stages)]
    return [order_1f1b(stage, stages, micro_batches) for stage in range(stages)]


KINDS = [("1f1b", 4, 1, 3), ("1f1b", 4, 1, 12), ("interleaved", 4, 3, 8), ("interleaved", 2, 2, 2),
         ("zero-bubble", 4, 1, 9), ("zero-bubble", 3, 1, 2)]  # fmt: skip


@pytest.mark.parametrize(("kind", "stages", "chunks", "micro_batches"), KINDS)
def test_every_micro_batch_passes_every_chunk_once(kind, stages, chunks, micro_batches) -> None:
    kinds = {FORWARD, BACKWARD} | ({WEIGHTS} if kind == "zero-bubble" else set())
    expected = sorted((k, c, m) for k in kinds for c in range(chunks) for m in range(micro_batches))
    for turns in orders(kind, stages, chunks, micro_batches):
        assert sorted((turn.kind, turn.chunk, turn.micro_batch) for turn in turns) == expected


@pytest.mark.parametrize(("kind", "stages", "chunks", "micro_batches"), KINDS)
def test_stages_never_wait_for_each_other_for_ever(kind, stages, chunks, micro_batches) -> None:
    waiting = [list(turns) for turns in orders(kind, stages, chunks, micro_batches)]
    done: set[tuple[str, int, int]] = set()  # (kind, part of the model, micro-batch)

    def ready(stage: int) -> bool:
        turn = waiting[stage][0]
        part = turn.chunk * stages + stage
        if turn.kind == FORWARD:
            return part == 0 or (FORWARD, part - 1, turn.micro_batch) in done
        if turn.kind == WEIGHTS:
            return (BACKWARD, part, turn.micro_batch) in done
        last = part == stages * chunks - 1
        return (FORWARD if last else BACKWARD, part + (not last), turn.micro_batch) in done

    while any(waiting):
        able = [stage for stage in range(stages) if waiting[stage] and ready(stage)]
        assert able, "no stage can go on"
        for stage in able:
            turn = waiting[stage].pop(0)
            done.add((turn.kind, turn.chunk * stages + stage, turn.micro_batch))


@pytest.mark.parametrize("kind", ["1f1b", "zero-bubble"])
def test_a_stage_holds_no_more_micro_batches_than_stages_follow(kind: str) -> None:
    for stage, turns in enumerate(orders(kind, 4, 1, 16)):
        held = most = 0
        for turn in turns:
            held += {FORWARD: 1, BACKWARD: -1, WEIGHTS: 0}[turn.kind]
            most = max(most, held)
        assert most == 4 - stage


def test_gradients_of_weights_fill_the_end_of_the_first_stage() -> None:
    first = order_zero_bubble([1.0] * 4, [1.0] * 4, [1.0] * 4, 8)[0]
    last_backward = max(i for i, turn in enumerate(first) if turn.kind == BACKWARD)
    assert any(turn.kind == WEIGHTS for turn in first[:last_backward])
    assert first[-1].kind == WEIGHTS


def test_the_ends_hold_fewer_layers() -> None:
    assert split_layers_into_parts(126, 8) == (15, 16, 16, 16, 16, 16, 16, 15)
    assert sum(split_layers_into_parts(61, 4, 4)) == 61

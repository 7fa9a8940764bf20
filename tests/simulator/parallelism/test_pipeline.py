"""Schedules of pipeline stages against an event simulation."""

from __future__ import annotations

import pytest

from traincast.simulator.parallelism.snippets import compute_pipeline_seconds, split_layers_into_parts


def _simulated(forward: list[float], backward: list[float], micro_batches: int) -> float:
    """One forward, one backward, by events: every stage runs its own order and waits for its neighbours."""
    stages = len(forward)
    orders = []
    for stage in range(stages):
        warm = min(micro_batches, stages - stage)
        order = [("f", i) for i in range(warm)]
        for i in range(micro_batches):
            order.append(("b", i))
            if warm + i < micro_batches:
                order.append(("f", warm + i))
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    clock, place = [0.0] * stages, [0] * stages
    while any(place[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            if place[s] == len(orders[s]):
                continue
            kind, i = orders[s][place[s]]
            before = (kind, s - 1 if kind == "f" else s + 1, i)
            first = before[1] < 0 or before[1] == stages
            wanted = ("f", s, i) if kind == "b" and before[1] == stages else before
            if (wanted if not first or kind == "b" else None) is not None and not (first and kind == "f"):
                if wanted not in done:
                    continue
                clock[s] = max(clock[s], done[wanted])
            clock[s] += forward[s] if kind == "f" else backward[s]
            done[kind, s, i] = clock[s]
            place[s] += 1
    return max(clock)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 32])
def test_equal_stages_take_what_a_simulation_says(stages: int, micro_batches: int) -> None:
    forward, backward = [1.0] * stages, [2.0] * stages
    total, bubble = compute_pipeline_seconds(forward, backward, micro_batches)
    assert total == pytest.approx(_simulated(forward, backward, micro_batches))
    assert bubble == pytest.approx(3.0 * (stages - 1))


def test_a_slower_last_stage_sets_the_pace() -> None:
    forward, backward = [1.0, 1.0, 1.0, 1.3], [2.0, 2.0, 2.0, 2.6]
    total, _ = compute_pipeline_seconds(forward, backward, 32)
    assert total == pytest.approx(_simulated(forward, backward, 32), rel=0.02)


def test_chunks_and_zero_bubble_shorten_the_ramp() -> None:
    plain = compute_pipeline_seconds([1.0] * 4, [2.0] * 4, 8)
    assert compute_pipeline_seconds([1.0] * 4, [2.0] * 4, 8, chunks=3) == (24.0 + 3.0, 3.0)
    assert plain == (33.0, 9.0)
    # forward, backward and weights one second each: F + B - W a stage instead of F + B + W
    assert compute_pipeline_seconds([1.0] * 4, [2.0] * 4, 8, weights=[1.0] * 4) == (27.0, 3.0)


@pytest.mark.parametrize(("layers", "stages", "chunks"), [(80, 8, 1), (126, 8, 8), (61, 16, 1), (94, 8, 4), (5, 4, 1)])
def test_all_layers_are_on_some_stage(layers: int, stages: int, chunks: int) -> None:
    counts = split_layers_into_parts(layers, stages, chunks)
    assert sum(counts) == layers and len(counts) == stages * chunks
    assert max(counts) - min(counts) <= 1

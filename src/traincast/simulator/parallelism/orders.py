"""Pipeline schedules (1F1B, interleaved, zero-bubble): the order of micro-batches in a stage, and when the last one is
done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass of one micro-batch through one chunk of a stage; `kind` is FORWARD, BACKWARD or WEIGHTS (the gradients
    of weights alone, where a schedule separates them)."""

    kind: str
    chunk: int
    micro_batch: int


def split_layers_into_parts(layers: int, stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Layers of every part of the model in order; part p is chunk p // stages of stage p % stages. Where they do not
    divide, the first and last parts get fewer: they also hold the embedding and the head.

    >>> part_layers(14, 4)
    (3, 4, 4, 3)
    """
    parts = stages * chunks
    base, left = divmod(layers, parts)
    by_part = [base] * parts
    for part in sorted(range(parts), key=lambda part: abs(2 * part - parts + 1))[:left]:
        by_part[part] += 1
    return tuple(by_part)


def order_1f1b(stage: int, stages: int, micro_batches: int) -> list[Turn]:
    """One forward, one backward: as many forwards ahead as stages follow (Narayanan et al. 2019)."""
    ahead = min(micro_batches, stages - stage - 1)
    turns = [Turn(FORWARD, 0, m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        turns += [Turn(FORWARD, 0, ahead + m), Turn(BACKWARD, 0, m)]
    return turns + [Turn(BACKWARD, 0, m) for m in range(micro_batches - ahead, micro_batches)]


def order_interleaved(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Turn]:
    """Chunks in turns of as many micro-batches as there are stages (Narayanan et al. 2021, Megatron-LM)."""
    total = micro_batches * chunks

    def turn(number: int, kind: str) -> Turn:
        group, inside = divmod(number, stages * chunks)
        chunk = inside // stages
        return Turn(kind, chunk if kind == FORWARD else chunks - 1 - chunk, group * stages + inside % stages)

    ahead = min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)
    turns = [turn(number, FORWARD) for number in range(ahead)]
    for number in range(total - ahead):
        turns += [turn(ahead + number, FORWARD), turn(number, BACKWARD)]
    return turns + [turn(number, BACKWARD) for number in range(total - ahead, total)]


def order_zero_bubble(
    forward: Sequence[float], backward: Sequence[float], weights: Sequence[float], micro_batches: int
) -> list[list[Turn]]:
    """The order of every stage where gradients of weights fill what would be bubbles, with the memory of 1F1B (ZB-H1,
    Qi et al. 2024): a stage prefers a backward pass, then a forward pass, then gradients of weights.

    `forward`, `backward` (inputs' gradients only) and `weights` are the seconds of a micro-batch on every stage.
    """
    stages = len(forward)
    orders: list[list[Turn]] = [[] for _ in range(stages)]
    done_f = [[float("inf")] * micro_batches for _ in range(stages)]
    done_b = [[float("inf")] * micro_batches for _ in range(stages)]
    clock, counts = [0.0] * stages, [[0, 0, 0] for _ in range(stages)]
    for _ in range(3 * micro_batches * stages):
        options = [_choose_next_turn(s, counts, clock, done_f, done_b, micro_batches) for s in range(stages)]
        ready = [(start, s, kind) for s, option in enumerate(options) if option is not None for start, kind in [option]]
        start, s, kind = min(ready)
        number = counts[s][kind]
        counts[s][kind] += 1
        clock[s] = start + (forward, backward, weights)[kind][s]
        if kind == 0:
            done_f[s][number] = clock[s]
        elif kind == 1:
            done_b[s][number] = clock[s]
        orders[s].append(Turn((FORWARD, BACKWARD, WEIGHTS)[kind], 0, number))
    return orders


def _choose_next_turn(
    s: int,
    counts: Sequence[Sequence[int]],
    clock: Sequence[float],
    done_f: Sequence[Sequence[float]],
    done_b: Sequence[Sequence[float]],
    micro_batches: int,
) -> tuple[float, int] | None:
    """When a stage can begin its next turn, and which kind it is (0 forward, 1 backward, 2 weights)."""
    stages = len(counts)
    f, b, w = counts[s]
    choices = []
    if b < f:
        arrived = done_f[s][b] if s == stages - 1 else done_b[s + 1][b]
        choices.append((max(clock[s], arrived), 1))
    if f < micro_batches and f - b < stages - s:
        choices.append((max(clock[s], 0.0 if s == 0 else done_f[s - 1][f]), 0))
    if w < b:
        choices.append((clock[s], 2))
    known = [choice for choice in choices if choice[0] < float("inf")]
    if not known:
        return None
    first = min(start for start, _ in known)
    return min((choice for choice in known if choice[0] <= first), key=lambda choice: (choice[1] != 1, choice[1]))


def compute_pipeline_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    *,
    chunks: int = 1,
    weights: Sequence[float] | None = None,
) -> tuple[float, float]:
    """Seconds of all micro-batches and of the idle time in them, for one-forward-one-backward schedules.

    `forward` and `backward` are the seconds of a micro-batch on every stage (all its chunks together). With several
    `chunks` a stage waits that much less while the pipeline fills and drains. `weights` are the parts of `backward`
    that only make gradients of weights: a zero-bubble schedule puts them where the stage would wait.

    >>> pipeline_seconds([1.0, 1.0], [2.0, 2.0], 4)
    (15.0, 3.0)
    """
    costs = [f + b for f, b in zip(forward, backward, strict=True)]
    slowest = max(costs)
    ramp = (sum(costs) - slowest) / chunks
    if weights is not None:
        # Qi et al. 2024: the bubble of a stage falls from F + B + W to F + B - W
        ramp = max(0.0, ramp - 2 * (sum(weights) - weights[costs.index(slowest)]) / chunks)
    return micro_batches * slowest + ramp, ramp

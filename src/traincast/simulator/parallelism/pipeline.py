"""Pipeline schedules: when the last micro-batch has left the last stage, from what one costs each stage."""

from __future__ import annotations

from collections.abc import Sequence


def split_layers_into_stages(layers: int, stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Layers of every stage over all its chunks. Where they do not divide, the first and last stages get fewer: they
    also hold the token embedding and the head.

    >>> stage_layers(126, 8)
    (15, 16, 16, 16, 16, 16, 16, 15)
    """
    parts = stages * chunks
    base, left = divmod(layers, parts)
    by_part = [base] * parts
    middle = sorted(range(parts), key=lambda part: abs(2 * part - parts + 1))
    for part in middle[:left]:
        by_part[part] += 1
    return tuple(sum(by_part[stage::stages]) for stage in range(stages))


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

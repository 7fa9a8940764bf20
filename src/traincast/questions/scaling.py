"""Scaling curves: the same step on one GPU after another, and how much of them is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from traincast.api import SCALINGS, load, load_on, predict
from traincast.errors import TraincastError
from traincast.platform.links import with_links
from traincast.platform.platform import load_platform
from traincast.prediction.scaling import ScalingCurve, ScalingPoint
from traincast.programs.sharded.hybrid import described_dlrm

if TYPE_CHECKING:
    from traincast.platform.platform import Platform

MAX_COUNTS = 64


class Variant(TypedDict, total=False):
    """Which variant of a workload: what `load` takes besides its name and batch size."""

    seq_len: int | None
    dtype: str
    mode: str | None
    optimizer: str | None
    attention: str | None
    embedding: str | None
    compiled: bool


def predict_scaling(
    workload: str | Path,
    *,
    on: str | Platform,
    gpus: Sequence[int],
    batch_size: int | None = None,
    scaling: str = "weak",
    clock_mhz: float | None = None,
    host: str | None = None,
    **variant: Unpack[Variant],
) -> ScalingCurve:
    """Predicts a step on every number of GPUs given. `batch_size` is that of one GPU when scaling is weak, and that of
    all GPUs together when it is strong."""
    if scaling not in SCALINGS:
        raise TraincastError(f"scaling '{scaling}' is unknown; choose {' or '.join(SCALINGS)}")
    counts = _checked(gpus)
    whole = _whole_batch(workload, batch_size, variant)
    batches = [_batch_of_one(whole, count, scaling) for count in counts]
    platform, _ = with_links(load_platform(on) if isinstance(on, str) else on)
    answers = []
    for count, batch in zip(counts, batches, strict=True):
        step, assumed = load_on(workload, platform, gpus=count, always_sharded=True, batch_size=batch, **variant)
        answer = predict(step, on=on, dtype=variant.get("dtype", "fp32"), clock_mhz=clock_mhz, host=host)
        answers.append(replace(answer, warnings=(*answer.warnings, assumed)) if assumed else answer)
    points: list[ScalingPoint] = []
    for count, batch, answer in zip(counts, batches, answers, strict=True):
        throughput = count * batch / answer.iteration
        alone = points[0].throughput / points[0].gpus if points else throughput / count
        nodes = -(-count // answer.platform.gpus_per_node)
        points.append(ScalingPoint(count, nodes, count * batch, throughput, throughput / count / alone, answer))
    return ScalingCurve(scaling, tuple(points))


def _whole_batch(workload: str | Path, batch_size: int | None, variant: Variant) -> int:
    """The batch size asked for, or the workload's own; one made for several GPUs is refused."""
    if variant.get("mode") != "inference" and not variant.get("compiled"):
        sharded = described_dlrm(str(workload))
        if sharded is not None:
            return sharded.batch_size if batch_size is None else batch_size
    base = load(workload, batch_size=batch_size, **variant)
    if len(base.ranks) > 1:
        raise TraincastError(
            f"workload '{base.name}' was made for {len(base.ranks)} GPUs; a curve needs one made for one GPU"
        )
    return base.batch_size


def _checked(gpus: Sequence[int]) -> list[int]:
    counts = sorted(set(gpus))
    if not counts or counts[0] < 1:
        raise TraincastError(f"numbers of GPUs must be 1 or more, not {', '.join(map(str, gpus))}")
    if len(counts) > MAX_COUNTS:
        raise TraincastError(f"{len(counts)} numbers of GPUs are too many; give at most {MAX_COUNTS}")
    return counts


def _batch_of_one(batch: int, gpus: int, scaling: str) -> int:
    if scaling == "weak":
        return batch
    if batch % gpus:
        raise TraincastError(
            f"a batch of {batch} cannot be divided among {gpus} GPUs (strong scaling); give a --batch-size that "
            f"is a multiple of {gpus}"
        )
    return batch // gpus

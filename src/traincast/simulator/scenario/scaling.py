"""Scaling curves: the same step on one number of GPUs after another, and how much of them is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traincast.ir.workload import Workload
from traincast.simulator.prediction.scaling import SCALINGS, ScalingCurve, ScalingPoint
from traincast.simulator.scenario.predict import Question, predict
from traincast.simulator.scenario.recommenders import described_dlrm
from traincast.simulator.scenario.workloads import load
from traincast.utils.errors import TraincastError

MAX_COUNTS = 64  # a curve of more points is a mistake in the command rather than a wish


def predict_scaling(question: Question, gpus: Sequence[int], scaling: str = "weak") -> ScalingCurve:
    """Predicts a step on every number of GPUs. The question's batch size is that of one GPU when scaling is weak, and
    that of all GPUs together when it is strong; its number of GPUs is not looked at."""
    if scaling not in SCALINGS:
        raise TraincastError(f"scaling '{scaling}' is unknown; choose {' or '.join(SCALINGS)}")
    counts = _checked(gpus)
    whole = _whole_batch(question)
    points: list[ScalingPoint] = []
    for count, batch in [(count, _batch_of_one(whole, count, scaling)) for count in counts]:
        variant = replace(question.variant, batch_size=batch)
        answer = predict(replace(question, variant=variant, gpus=count), always_sharded=True)
        throughput = count * batch / answer.iteration
        alone = points[0].throughput / points[0].gpus if points else throughput / count
        nodes = -(-count // answer.platform.gpus_per_node)
        points.append(ScalingPoint(count, nodes, count * batch, throughput, throughput / count / alone, answer))
    return ScalingCurve(scaling, tuple(points))


def _whole_batch(question: Question) -> int:
    """The batch size asked for, or the workload's own; one made for several GPUs is refused."""
    variant = question.variant
    if variant.trains_eagerly and not isinstance(question.workload, Workload):
        sharded = described_dlrm(str(question.workload))
        if sharded is not None:
            return sharded.batch_size if variant.batch_size is None else variant.batch_size
    workload = load(question.workload, variant)
    if len(workload.ranks) > 1:
        raise TraincastError(
            f"workload '{workload.name}' was made for {len(workload.ranks)} GPUs; a curve needs one made for one GPU"
        )
    return workload.batch_size


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
            f"a batch of {batch} cannot be divided among {gpus} GPUs (strong scaling); give a `batch_size` that "
            f"is a multiple of {gpus}"
        )
    return batch // gpus

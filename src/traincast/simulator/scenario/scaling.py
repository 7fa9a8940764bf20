"""Scaling curves: the same step on one number of GPUs after another, and how much of them is used."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.simulator.prediction.scaling import SCALINGS, ScalingCurve, ScalingPoint
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import Resolved, resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError

MAX_COUNTS = 64  # a curve of more points is a mistake in the command rather than a wish


def predict_scaling(scenario: Scenario, gpus: Sequence[int], scaling: str = "weak") -> ScalingCurve:
    """Predicts a step on every number of GPUs. The batch size of the scenario is that of one GPU when scaling is weak,
    and that of all GPUs together when it is strong; its own number of GPUs is not used."""
    if scaling not in SCALINGS:
        raise TraincastError(f"scaling '{scaling}' is unknown; choose {' or '.join(SCALINGS)}")
    counts = _check_gpu_counts(gpus)
    resolved = resolve(scenario.replace(gpus=None))
    _check_curve(resolved)
    whole = _get_whole_batch(resolved)
    points: list[ScalingPoint] = []
    for count, batch in [(count, _get_batch_per_gpu(whole, count, scaling)) for count in counts]:
        result = predict(resolved.changed(batch_size=batch, gpus=count), always_sharded=True)
        throughput = count * batch / result.iteration
        alone = points[0].throughput / points[0].gpus if points else throughput / count
        nodes = -(-count // result.platform.gpus_per_node)
        points.append(ScalingPoint(count, nodes, count * batch, throughput, throughput / count / alone, result))
    return ScalingCurve(scaling, tuple(points))


def _check_curve(resolved: Resolved) -> None:
    """Rejects steps that have no curve."""
    if resolved.source in ("transformer", "tables"):
        raise TraincastError(
            f"{resolved.name} is laid out for one number of GPUs at a time; give one number of `gpus`, or 'traincast "
            "sweep' with `gpus` varied"
        )
    for name in ("skew_ms", "jitter", "loader_ms", "pageable", "plan", "micro_batch", "global_batch"):
        if getattr(resolved.scenario, name):
            raise TraincastError(f"`{name}` is for one prediction; give one number of `gpus`")


def _get_whole_batch(resolved: Resolved) -> int:
    """The batch size asked for, or the workload's own; one made for several GPUs is rejected."""
    scenario = resolved.scenario
    if scenario.trains_eagerly and resolved.source == "dlrm":
        return resolved.of_dlrm().batch_size if scenario.batch_size is None else scenario.batch_size
    workload = load_single_gpu_step(scenario, resolved.source)
    if len(workload.ranks) > 1:
        raise TraincastError(
            f"workload '{workload.name}' was made for {len(workload.ranks)} GPUs; a curve needs one made for one GPU"
        )
    return workload.batch_size


def _check_gpu_counts(gpus: Sequence[int]) -> list[int]:
    counts = sorted(set(gpus))
    if not counts or counts[0] < 1:
        raise TraincastError(f"numbers of GPUs must be 1 or more, not {', '.join(map(str, gpus))}")
    if len(counts) > MAX_COUNTS:
        raise TraincastError(f"{len(counts)} numbers of GPUs are too many; give at most {MAX_COUNTS}")
    return counts


def _get_batch_per_gpu(batch: int, gpus: int, scaling: str) -> int:
    if scaling == "weak":
        return batch
    if batch % gpus:
        raise TraincastError(
            f"a batch of {batch} cannot be divided among {gpus} GPUs (strong scaling); give a `batch_size` that "
            f"is a multiple of {gpus}"
        )
    return batch // gpus

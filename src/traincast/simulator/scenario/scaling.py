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
    _check_curve(resolved, scaling)
    laid_out = resolved.kind == "parallel"
    whole = _get_whole_batch(resolved)
    points: list[ScalingPoint] = []
    for count in counts:
        sizes = _size_layout if laid_out else _size_step
        result = predict(resolved.changed(gpus=count, **sizes(resolved.scenario, whole, count, scaling)))
        figures = result.parallel
        samples = count * result.workload.batch_size if figures is None else figures.layout.global_batch
        throughput = samples / result.iteration
        alone = points[0].throughput / points[0].gpus if points else throughput / count
        nodes = -(-count // result.platform.gpus_per_node)
        points.append(ScalingPoint(count, nodes, samples, throughput, throughput / count / alone, result))
    return ScalingCurve(scaling, tuple(points))


def _size_step(scenario: Scenario, whole: int, gpus: int, scaling: str) -> dict[str, int | None]:
    """The batch of a GPU."""
    return {"batch_size": _get_batch_per_gpu(whole, gpus, scaling)}


def _size_layout(scenario: Scenario, whole: int, gpus: int, scaling: str) -> dict[str, int | None]:
    """The batches of a Transformer that is laid out: micro-batches stay, and of a strong curve so does the step's
    number of samples; layouts check that they divide."""
    if scaling == "weak":
        return {}
    return {"batch_size": None, "micro_batch": scenario.micro_batch or 1, "global_batch": whole}


def _check_curve(resolved: Resolved, scaling: str) -> None:
    """Rejects steps that have no curve."""
    if resolved.source == "tables":
        raise TraincastError(
            f"{resolved.name} is laid out for one number of GPUs at a time; give one number of `gpus`, or 'traincast "
            "sweep' with `gpus` varied"
        )
    passes: tuple[str, ...] = ("micro_batch", "global_batch")
    if resolved.kind == "parallel":
        passes = () if scaling == "strong" else ("global_batch",)
    for name in ("skew_ms", "jitter", "loader_ms", "pageable", "plan", *passes):
        if getattr(resolved.scenario, name):
            raise TraincastError(f"`{name}` is for one prediction; give one number of `gpus`")


def _get_whole_batch(resolved: Resolved) -> int:
    """The batch size asked for, or the workload's own; one made for several GPUs is rejected."""
    scenario = resolved.scenario
    if resolved.kind == "parallel":
        return scenario.global_batch or scenario.samples_per_pass or 1
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

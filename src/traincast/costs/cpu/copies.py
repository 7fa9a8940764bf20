"""Copies between the host and a device, or within the memory of a CPU: seconds by direction and kind of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from typing import TYPE_CHECKING

import numpy as np

from traincast.costs.cpu.estimator import KindModel, fit_kind
from traincast.ir.ops import Signature, TensorSpec
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow, error_row, within

if TYPE_CHECKING:
    from traincast.costs.cpu.samples import Sample

NAME = "traincast::copy"
FAMILY = "host copies"
"""Under which their held-out error is reported."""
DIRECTIONS = ("to device", "to host", "in memory")
"""From the host to a GPU, back, and from one place of a CPU's memory to another."""
MEMORIES = ("pinned", "pageable")
_FEWEST = 4  # samples of a kind
_NEAR_BYTES = 4 << 20  # what is beyond leaves the caches on its way


def copy_signature(direction: str, memory: str, nbytes: int) -> Signature:
    """A copy of so many bytes as the signature of a sample."""
    scalars = (("direction", direction), ("memory", memory))
    return Signature(NAME, (TensorSpec((nbytes,), (1,), "uint8"),), (), scalars, (("self", 1),))


def is_copy(signature: Signature | None) -> bool:
    """Whether a sample is of a copy."""
    return signature is not None and signature.name == NAME


def copy_of(signature: Signature) -> tuple[str, str, int]:
    """(direction, memory, bytes) of a sample's signature."""
    direction, memory = signature.scalar("direction"), signature.scalar("memory")
    if direction not in DIRECTIONS or memory not in MEMORIES or not signature.inputs:
        raise TraincastError("a sample of a copy in the store is damaged; measure it again")
    return str(direction), str(memory), signature.inputs[0].nbytes


def fit_copies(samples: Sequence[Sample], reference: float, clock: str) -> tuple[dict[str, KindModel], list[ErrorRow]]:
    """A model per direction and memory ("to device, pinned"), with the errors that a fit on those not held out makes
    on the others."""
    kept = _models([sample for sample in samples if not sample.held_out], reference, clock)
    points = []
    for sample in samples:
        key, terms, place = _features(sample)
        if sample.held_out and key in kept:
            points.append(
                (*kept[key].predict(terms, place), reference * sample.ratio(clock), f"{key}, {terms[1]:,.0f}")
            )
    models = _models(samples, reference, clock)
    if not points:
        return models, []
    guessed, sigmas, measured = (np.array(column) for column in list(zip(*points, strict=True))[:3])
    inside = within(guessed, measured, sigmas)
    return models, [error_row("held out", FAMILY, guessed, measured, [point[3] for point in points], inside=inside)]


def copy_seconds(models: Mapping[str, KindModel], direction: str, memory: str, nbytes: int) -> tuple[float, float]:
    """Seconds of a copy, and the spread of their logarithm."""
    key = f"{direction}, {memory}"
    if key not in models:
        raise TraincastError(f"copies {key} were not measured; measure with 'traincast bench', then fit again")
    return models[key].predict(*_terms(nbytes))


def _terms(nbytes: int) -> tuple[FloatArray, FloatArray]:
    return np.array([1.0, nbytes, max(nbytes - _NEAR_BYTES, 0.0)]), np.array([log2(max(nbytes, 1))])


def _features(sample: Sample) -> tuple[str, FloatArray, FloatArray]:
    assert sample.signature is not None
    direction, memory, nbytes = copy_of(sample.signature)
    return (f"{direction}, {memory}", *_terms(nbytes))


def _models(samples: Sequence[Sample], reference: float, clock: str) -> dict[str, KindModel]:
    kinds: dict[str, list[tuple[FloatArray, FloatArray, float]]] = {}
    for sample in samples:
        key, terms, place = _features(sample)
        kinds.setdefault(key, []).append((terms, place, reference * sample.ratio(clock)))
    return {
        key: fit_kind(*(np.array(column) for column in zip(*points, strict=True)))
        for key, points in kinds.items()
        if len(points) >= _FEWEST
    }

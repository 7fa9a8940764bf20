"""GEMM predictions against measurements that took no part in fitting, alongside NeuSight's published errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import COMPUTE_TYPES, load_state
from traincast.costs.kernels.families import PROFILES
from traincast.costs.kernels.gemm.model import GemmModel
from traincast.utils.arrays import BoolArray
from traincast.utils.metrics import ErrorRow, compute_error_row
from traincast_evaluation.kernels.gemm.fit import (
    EXTENDED,
    Comparison,
    compare,
    engine_rows,
    is_fittable,
    without_later_devices,
)
from traincast_evaluation.kernels.gemm.measurements import BLACKWELL_FILE, FILES, GemmSamples, kernels_run, read_gemm

PROFILE = PROFILES / "gemm"
_JUDGED = 5  # of the held-out shapes of the Blackwell table, one in this many: 22,000 rows
_TRAINED = ("Tesla P4", "Tesla P100-PCIE-16GB", "Tesla V100-PCIE-32GB", "Tesla T4", "NVIDIA A100-PCIE-40GB")
# mean absolute errors that NeuSight publishes, percent, by kind and whether the GPU was in its training set
_NEUSIGHT = {("bmm", True): 26.0, ("bmm", False): 13.8, ("linear", True): 20.0, ("linear", False): 13.9}


def evaluate_gemm(data: Path, profile: Path = PROFILE) -> list[ErrorRow]:
    """Error rows by table, split, device, kind and compute type."""
    return [
        compute_error_row(suite, group, part.shown, part.samples.seconds, part.samples.names(), reference, part.inside)
        for suite, group, part, reference in _groups(data, profile)
    ]


def _groups(data: Path, profile: Path) -> Iterator[tuple[str, str, Comparison, str]]:
    model = GemmModel.from_state(load_state(profile))
    stopwatch = json.loads(profile.with_suffix(".json").read_text(encoding="utf-8"))["stopwatch_us"]
    for file in FILES:
        samples = read_gemm(data, file)
        unseen = ~is_fittable(samples)
        comparison = compare(model, samples.take(unseen), stopwatch)
        yield from _split(file, comparison)
        if file == "gemm_fp32":
            yield from _same_kernels(comparison, known_kernels(samples, kernels_run(data))[unseen])
    yield from _blackwell(data, model, stopwatch)


def _blackwell(
    data: Path, model: GemmModel, stopwatch: dict[str, list[float]]
) -> Iterator[tuple[str, str, Comparison, str]]:
    """Held-out shapes of the Blackwell table; and as if its devices had no codes, where networks know other chips."""
    samples = read_gemm(data, BLACKWELL_FILE)
    held = samples.take(np.flatnonzero(samples.held_out)[::_JUDGED])
    yield from _split(BLACKWELL_FILE, compare(model, held, stopwatch))
    strangers = held.take(engine_rows(held, *EXTENDED))
    yield from _split(f"{BLACKWELL_FILE} GPU never seen,", compare(without_later_devices(model), strangers, stopwatch))


def known_kernels(samples: GemmSamples, kernels: npt.NDArray[Any]) -> BoolArray:
    """Samples whose kernel also ran in a fitted one of the same machine: elsewhere the library chose otherwise."""
    run = [f"{machine}/{kernel}" for machine, kernel in zip(samples.machine, kernels, strict=True)]
    return np.isin(run, np.array(run)[is_fittable(samples)])


def _same_kernels(comparison: Comparison, known: BoolArray) -> Iterator[tuple[str, str, Comparison, str]]:
    """The test split of the training GPUs without rows whose kernels none of their training rows ran."""
    kinds = np.array(comparison.samples.calls.family.kinds)[comparison.samples.calls.kind]
    trained = np.isin(comparison.samples.device_names(), _TRAINED)
    for kind in ("bmm", "linear"):
        part = _take(comparison, comparison.samples.test & (kinds == kind) & trained & known)
        yield (
            "gemm_fp32 test split",
            f"training GPUs, kernels seen in training {kind} fp32",
            part,
            _reference(kind, True),
        )


def _split(file: str, comparison: Comparison) -> Iterator[tuple[str, str, Comparison, str]]:
    samples = comparison.samples
    kinds = np.array(samples.calls.family.kinds)[samples.calls.kind]
    compute = np.array(COMPUTE_TYPES)[samples.calls.compute]
    names = samples.device_names()
    apart = samples.test if file == "gemm_fp32" else np.zeros(len(samples), dtype=np.bool_)
    for name, kind, dtype, test in sorted(set(zip(names, kinds, compute, apart, strict=True)), key=_order):
        use = (apart == test) & (names == name) & (kinds == kind) & (compute == dtype)
        suite = f"{file} {'test split' if test else 'held-out shapes'}"
        reference = _reference(kind, name in _TRAINED) if test else ""
        yield suite, f"{name} {kind} {dtype}", _take(comparison, use), reference
    for kind in ("bmm", "linear"):
        for trained in (True, False):
            use = apart & (kinds == kind) & (np.isin(names, _TRAINED) == trained)
            if use.any():
                group = f"all {'training' if trained else 'unseen'} GPUs {kind} fp32"
                yield f"{file} test split", group, _take(comparison, use), _reference(kind, trained)


def _order(group: tuple[str, str, str, bool]) -> tuple[bool, str, str, str]:
    name, kind, dtype, test = group
    return bool(test), str(name), str(kind), str(dtype)


def _take(comparison: Comparison, use: BoolArray) -> Comparison:
    return Comparison(comparison.samples.take(use), comparison.shown[use], comparison.inside[use])


def _reference(kind: str, trained: bool) -> str:
    return f"NeuSight {_NEUSIGHT[kind, trained]} over its {'training' if trained else 'unseen'} GPUs"

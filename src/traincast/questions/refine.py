"""A few measurements of a GPU that is built in: by how much they correct its shipped model, family by family."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traincast.calibration.copies import copy_of, is_copy
from traincast.calibration.samples import Sample
from traincast.errors import TraincastError
from traincast.files.reading import shown_path
from traincast.files.writing import write_bytes
from traincast.kernels.call import Calls, KernelCall
from traincast.kernels.cost import price_calls
from traincast.kernels.lower import lower
from traincast.kernels.registry import LoweringContext
from traincast.platform.device import Device
from traincast.platform.platform import load_platform
from traincast.results import Records, Result
from traincast.workload.ops import Signature, TensorSpec

SHIPPED_COUNTS_AS = 10.0
"""Samples that the shipped model stands for: it was fitted to thousands, of other machines of the same kind."""


@dataclass(frozen=True, slots=True)
class FamilyCorrection:
    """`measured` over predicted time (geometric mean) of so many samples, and what is made of it: the `factor`. Errors
    are mean absolute percentages before and after."""

    family: str
    samples: int
    measured: float
    factor: float
    error_before: float
    error_after: float


@dataclass(frozen=True, repr=False)
class Refined(Result):
    """The corrections of a built-in GPU, and the file that holds them."""

    platform: str
    file: Path
    corrections: tuple[FamilyCorrection, ...]

    def to_dict(self) -> dict[str, Any]:
        """One row per family."""
        rows = [
            {name: getattr(row, name) for name in FamilyCorrection.__dataclass_fields__} for row in self.corrections
        ]
        return {"platform": self.platform, "file": str(self.file), "corrections": rows}

    def headline(self) -> str:
        """By how much and where."""
        lines = [f"{self.file}: {self.platform}, refined; predict with it as a platform"]
        for row in self.corrections:
            lines.append(
                f"{row.family:<12} {row.samples:4d} samples take {row.measured:.2f} times the prediction: corrected by "
                f"{row.factor:.2f}, error {row.error_before:.0f} % -> {row.error_after:.0f} %"
            )
        return "\n".join(lines)

    def records(self) -> Records:
        """Table "corrections"."""
        return {"corrections": self.to_dict()["corrections"]}


def corrections(samples: Iterable[Sample], device: Device) -> tuple[FamilyCorrection, ...]:
    """Corrections from samples of ops that are one kernel of a family with a model."""
    ratios: dict[str, list[float]] = {}
    for sample in samples:
        call = _only_kernel(sample)
        if call is not None:
            estimate, _ = price_calls(Calls.of(call.family, [call]), device)
            predicted = float(estimate.seconds[0]) * device.corrections.get(call.family.name, 1.0)
            ratios.setdefault(call.family.name, []).append(math.log(sample.wall / predicted))
    return tuple(_corrected(family, np.array(logs)) for family, logs in sorted(ratios.items()))


def _corrected(family: str, logs: Any) -> FamilyCorrection:
    """Shrunk towards no correction: the shipped model counts as `SHIPPED_COUNTS_AS` samples. The middle is a median."""
    middle = float(np.median(logs))
    factor = math.exp(middle * len(logs) / (len(logs) + SHIPPED_COUNTS_AS))
    before, after = (100 * float(np.mean(np.abs(scale * np.exp(-logs) - 1.0))) for scale in (1.0, factor))
    return FamilyCorrection(family, len(logs), math.exp(middle), factor, before, after)


def _only_kernel(sample: Sample) -> KernelCall | None:
    """The kernel of a sample that is one; a copy from pageable memory waits besides. Collectives are none: what they
    take is the business of a node's topology."""
    if sample.signature is None or sample.ranks > 1:
        return None
    if "sparse_coo" in [value for _, value in sample.signature.scalars]:
        return None
    signature = _transfer(sample.signature) if is_copy(sample.signature) else sample.signature
    kernels = [item for item in lower(signature, LoweringContext()) if isinstance(item, KernelCall)]
    return kernels[0] if len(kernels) == 1 and not kernels[0].estimated else None


def _transfer(signature: Signature) -> Signature:
    """A measured copy as the op that makes it."""
    direction, memory, nbytes = copy_of(signature)
    host = TensorSpec((nbytes,), (1,), "uint8", "cpu:pinned" if memory == "pinned" else "cpu")
    there = TensorSpec((nbytes,), (1,), "uint8", "cuda:0")
    target, source = (there, host) if direction == "to device" else (host, there)
    scalars = (("non_blocking", memory == "pinned"),)
    return Signature("aten::copy_", (target, source), (target,), scalars, (("self", 1), ("src", 1)))


def refine(folder: Path, key: str, out: Path | None) -> Refined:
    """Compares a store of a GPU with the shipped model of a built-in one and writes the corrections."""
    from traincast.benching.store import Store

    if not folder.is_dir():
        raise TraincastError(f"no store '{shown_path(folder)}'; measure one with 'traincast bench'")
    store = Store(folder)
    if store.identity is None or store.identity.device != "cuda":
        raise TraincastError(f"store '{shown_path(folder)}' holds no samples of a GPU; fit it without `refine`")
    platform = load_platform(key)
    rows = corrections(store.samples(), platform.device)
    if not rows:
        raise TraincastError(f"store '{shown_path(folder)}' has no op that {key} has a model for; measure for longer")
    path = out or Path(f"{Path(key).stem}-refined.toml")
    lines = [f"refines = {json.dumps(key)}", f"source = {json.dumps(store.identity.name)}", "[corrections]"]
    lines += [f"{json.dumps(row.family)} = {row.factor:.4f}" for row in rows]
    write_bytes(path, ("\n".join(lines) + "\n").encode())
    return Refined(key, path, rows)

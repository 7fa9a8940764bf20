"""A few measurements or a traced run of a built-in GPU: by how much they correct its shipped models, family by family
of kernels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traincast.calibration.bench.signatures import is_overhead, parse_overhead_signature
from traincast.costs.collectives import COLLECTIVE, load_shipped_collectives, share_bytes_evenly
from traincast.costs.cpu.collectives import is_collective, list_collectives
from traincast.costs.cpu.samples import Sample, is_copy, read_copy
from traincast.costs.host.profile import HostProfile, get_current_name, load_usual_host
from traincast.costs.kernels.contract import Calls, KernelCall
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware.device import HOST
from traincast.hardware.platform import CORRECTIONS, Platform, add_default_links, load_platform
from traincast.hardware.topology import COLLECTIVE as COLLECTIVES
from traincast.ir.ops import Signature, TensorSpec
from traincast.traces.overheads.extraction import TYPES as OVERHEAD_TYPES
from traincast.traces.replay.analysis import PLATFORM_HOST, TraceOptions, analyse_traces
from traincast.traces.replay.attribution import Attribution
from traincast.traces.replay.kernels import KEPT
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path
from traincast.utils.files.writing import write_bytes
from traincast.utils.results import Records, Result

SHIPPED_COUNTS_AS = 10.0
"""Samples that the shipped model stands for: it was fitted to thousands, of other machines of the same kind."""

_KERNEL_SPREAD, _COLLECTIVE_SPREAD = 0.25, 1.0  # of repetitions, beyond which a sample says too little


@dataclass(frozen=True, slots=True)
class FamilyCorrection:
    """`measured` over predicted time (geometric mean) of this many samples, and what is made of it: the `factor`.
    Errors are mean absolute percentages before and after."""

    family: str
    samples: int
    measured: float
    factor: float
    error_before: float
    error_after: float


@dataclass(frozen=True, repr=False)
class Refined(Result):
    """The corrections of a built-in GPU, and the file that holds them. Families are those of kernels, "host" (what the
    host takes), and "collective all_reduce" and the like."""

    platform: str
    file: Path
    corrections: tuple[FamilyCorrection, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """One row per family."""
        rows = [
            {name: getattr(row, name) for name in FamilyCorrection.__dataclass_fields__} for row in self.corrections
        ]
        return {"platform": self.platform, "file": str(self.file), "corrections": rows, "notes": list(self.notes)}

    def headline(self) -> str:
        """By how much and where."""
        lines = [f"{self.file}: {self.platform}, refined; predict with it as a platform"]
        for row in self.corrections:
            lines.append(
                f"{row.family:<25} {row.samples:4d} samples take {row.measured:.2f} times the prediction: corrected by "
                f"{row.factor:.2f}, error {row.error_before:.0f} % -> {row.error_after:.0f} %"
            )
        return "\n".join([*lines, *self.notes])

    def records(self) -> Records:
        """Table "corrections"."""
        return {"corrections": self.to_dict()["corrections"]}


def compute_corrections(samples: Iterable[Sample], platform: Platform) -> tuple[FamilyCorrection, ...]:
    """Corrections from samples of ops that are one kernel of a family with a model, of collectives between GPUs of one
    node, and of what the host takes. Samples that were disturbed say nothing."""
    joined = add_default_links(platform)
    host = load_usual_host(platform.device)
    every = [sample for sample in samples if sample.wall > 0.0]
    reference = float(np.median([sample.reference_wall for sample in every])) if every else 0.0
    ratios: dict[str, list[float]] = {}
    for sample in every:
        if is_overhead(sample.signature):
            found, predicted = HOST, _predict_overhead(sample, host)
            seconds = sample.wall  # the host's clock does not move with that of the GPU
        else:
            found, predicted = _predict_sample(sample, joined)
            seconds = reference * sample.ratio("wall")
        if predicted > 0.0:
            ratios.setdefault(found, []).append(math.log(seconds / predicted))
    return tuple(_shrink_correction(family, np.array(logs)) for family, logs in sorted(ratios.items()))


def _predict_sample(sample: Sample, platform: Platform) -> tuple[str, float]:
    """The family of a sample and its seconds by the shipped model; 0 where that has nothing to say, or the sample was
    disturbed."""
    device, topology = platform.device, platform.topology
    assert topology is not None
    if is_collective(sample.signature):
        assert sample.signature is not None
        met = list_collectives(sample.signature, sample.ranks)
        if sample.spread > _COLLECTIVE_SPREAD or not 2 <= len(met) <= topology.gpus_per_node:
            return "", 0.0
        size = share_bytes_evenly([exchange.sent for exchange in met]) if met[0].sent else float(met[0].message_bytes)
        call = Calls.from_columns(COLLECTIVE, [met[0].kind], ["fp32"], np.array([[size, len(met), 1.0]]))
        return COLLECTIVES + met[0].kind, float(load_shipped_collectives().predict(call, topology).seconds[0])
    kernel = _find_only_kernel(sample) if sample.spread <= _KERNEL_SPREAD else None
    if kernel is None:
        return "", 0.0
    estimate, _ = price_calls(Calls.of(kernel.family, [kernel]), device)
    return kernel.family.name, float(estimate.seconds[0]) * device.corrections.get(kernel.family.name, 1.0)


def _predict_overhead(sample: Sample, host: HostProfile) -> float:
    """Seconds of an overhead by the host profile; 0 for what it does not know, and for calls that wait."""
    assert sample.signature is not None
    kind, name = parse_overhead_signature(sample.signature)
    table = getattr(host, kind.lower())
    return float(table.get(get_current_name(name), 0.0)) if name != "synchronize" else 0.0


def _shrink_correction(family: str, logs: Any) -> FamilyCorrection:
    """Shrunk towards no correction: the shipped model counts as `SHIPPED_COUNTS_AS` samples. The middle is a median."""
    middle = float(np.median(logs))
    factor = shrink_factor(middle, len(logs))
    before, after = (100 * float(np.mean(np.abs(scale * np.exp(-logs) - 1.0))) for scale in (1.0, factor))
    return FamilyCorrection(family, len(logs), math.exp(middle), factor, before, after)


def shrink_factor(log_ratio: float, samples: int) -> float:
    """The factor by which so many samples, that take exp(`log_ratio`) times what was predicted, correct a model."""
    return math.exp(log_ratio * samples / (samples + SHIPPED_COUNTS_AS))


def write_refined_platform(out: Path | None, key: str, source: str, rows: Iterable[FamilyCorrection]) -> Path:
    """Writes corrections of a built-in GPU as a platform; `source` is what they are from."""
    path = out or Path(f"{Path(key).stem}-refined.toml")
    lines = [f"refines = {json.dumps(key)}", f"source = {json.dumps(source)}", "[corrections]"]
    lines += [f"{json.dumps(row.family)} = {row.factor:.4f}" for row in rows]
    write_bytes(path, ("\n".join(lines) + "\n").encode())
    return path


def _find_only_kernel(sample: Sample) -> KernelCall | None:
    """The kernel of a sample that is one; a copy from pageable memory waits besides."""
    if sample.signature is None or sample.ranks > 1:
        return None
    if "sparse_coo" in [value for _, value in sample.signature.scalars]:
        return None
    signature = _make_transfer_op(sample.signature) if is_copy(sample.signature) else sample.signature
    kernels = [item for item in lower(signature, LoweringContext()) if isinstance(item, KernelCall)]
    return kernels[0] if len(kernels) == 1 and not kernels[0].estimated else None


def _make_transfer_op(signature: Signature) -> Signature:
    """A measured copy as the op that makes it."""
    direction, memory, nbytes = read_copy(signature)
    host = TensorSpec((nbytes,), (1,), "uint8", "cpu:pinned" if memory == "pinned" else "cpu")
    there = TensorSpec((nbytes,), (1,), "uint8", "cuda:0")
    target, source = (there, host) if direction == "to device" else (host, there)
    scalars = (("non_blocking", memory == "pinned"),)
    return Signature("aten::copy_", (target, source), (target,), scalars, (("self", 1), ("src", 1)))


def refine_platform(folder: Path, key: str, out: Path | None) -> Refined:
    """Compares a store of a GPU with the shipped model of a built-in one and writes the corrections."""
    from traincast.calibration.bench.store import Store

    if not folder.is_dir():
        raise TraincastError(f"no store '{format_path(folder)}'; measure one with 'traincast bench'")
    store = Store(folder)
    if store.identity is None or store.identity.device != "cuda":
        raise TraincastError(f"store '{format_path(folder)}' holds no samples of a GPU; fit it without `refine`")
    platform = load_platform(key)
    locked = store.identity.locked_clock_mhz
    rows = compute_corrections(store.samples(), platform.with_clock(locked) if locked else platform)
    if not rows:
        raise TraincastError(f"store '{format_path(folder)}' has no op that {key} has a model for; measure for longer")
    wild = [row for row in rows if not CORRECTIONS[0] <= row.factor <= CORRECTIONS[1]]
    if wild:
        raise TraincastError(
            f"'{wild[0].family}' takes {wild[0].measured:.3g} times what {key} predicts: the store is of a "
            f"'{store.identity.name}'; name the platform that it is"
        )
    path = write_refined_platform(out, key, store.identity.name, rows)
    return Refined(key, path, rows, _write_notes(store.identity.name, locked, platform))


def _write_notes(name: str, locked: float, platform: Platform) -> tuple[str, ...]:
    """What a reader of the corrections has to know."""
    notes = []
    if name != platform.device.name:
        notes.append(f"the store is of a '{name}' and {platform.key} describes a '{platform.device.name}'")
    if locked:
        notes.append(f"measured at {locked:.0f} MHz: compared with {platform.key} at that clock")
    assumed = add_default_links(platform).assumed
    return (*notes, *([assumed] if assumed else []))


_LEAST_SECONDS = 1e-6  # of a family in the steps fitted to: less says nothing


@dataclass(frozen=True, slots=True)
class _Times:
    """Measured and predicted seconds of a family (or "host") in steps fitted to and in others, and how many samples the
    first are."""

    fitted: tuple[float, float]
    others: tuple[float, float]
    samples: int


def refine_from_traces(files: Sequence[str | Path], key: str, out: Path | None) -> Refined:
    """Compares traced steps with the shipped models of a built-in GPU and writes the corrections. Every other step is
    fitted to; errors are those of the steps between them."""
    platform = load_platform(key)
    before = analyse_traces(files, TraceOptions(platform=platform, host=PLATFORM_HOST, host_scale=1.0))
    rows = tuple(_make_correction(family, times) for family, times in sorted(_sum_times(before).items()))
    if not rows:
        raise TraincastError(
            f"the traces have no kernel that {key} has a model for; record shapes (record_shapes=True)"
        )
    names = {rank.linked.trace.device_name for rank in before.ranks} - {""}
    path = write_refined_platform(out, key, ", ".join(sorted(names)) or "traces", rows)
    return Refined(key, path, rows, _write_trace_notes(files, platform, path, before, names))


def _sum_times(report: TraceReport) -> dict[str, _Times]:
    totals: dict[str, list[FloatArray]] = {}
    for rank in report.ranks:
        assert rank.attribution is not None
        kernels, fitted = rank.attribution.kernels, _find_fitted_steps(rank)
        step = rank.linked.step[kernels.row]
        modelled = ~np.isin(kernels.known, KEPT) & (step >= 0)
        for family in sorted(set(kernels.family)):
            mine = modelled & np.array([name == family for name in kernels.family])
            totals.setdefault(family, []).append(_split(kernels.measured, kernels.predicted, mine, fitted[step]))
        totals.setdefault(HOST, []).append(_sum_host(rank, rank.attribution, fitted))
    found = {}
    for family, parts in totals.items():
        whole = np.sum(parts, axis=0)
        if min(whole[0], whole[1]) > _LEAST_SECONDS:
            found[family] = _Times((whole[0], whole[1]), (whole[2], whole[3]), int(whole[4]))
    return found


def _find_fitted_steps(rank: RankReport) -> BoolArray:
    """Which steps are fitted to: every other, from the first on."""
    return np.asarray(np.arange(len(rank.linked.steps)) % 2 == 0)


def _split(measured: FloatArray, predicted: FloatArray, mine: BoolArray, fitted: BoolArray) -> FloatArray:
    """Measured and predicted seconds fitted to, those of others, and how many the first are."""
    sums = [float(seconds[mine & part].sum()) for part in (fitted, ~fitted) for seconds in (measured, predicted)]
    return np.array([*sums, float((mine & fitted).sum())])


def _sum_host(rank: RankReport, attribution: Attribution, fitted: BoolArray) -> FloatArray:
    """Likewise of overheads; what recording costs is in both."""
    pieces = [block for block in attribution.host.pieces if block.kind in OVERHEAD_TYPES]
    point = rank.instructions.point[[block.instruction for block in pieces]] if pieces else np.empty(0, dtype=np.int64)
    step = np.where(point >= 0, rank.linked.step[np.maximum(point, 0)], -1)
    measured, pooled = (np.array([getattr(block, name) for block in pieces]) for name in ("measured", "pooled"))
    return _split(measured, pooled, step >= 0, fitted[step])


def _make_correction(family: str, times: _Times) -> FamilyCorrection:
    measured = times.fitted[0] / times.fitted[1]
    factor = shrink_factor(math.log(measured), times.samples)
    seen = times.others if min(times.others) > 0 else times.fitted
    before, after = (100 * abs(scale * seen[1] / seen[0] - 1.0) for scale in (1.0, factor))
    return FamilyCorrection(family, times.samples, measured, factor, before, after)


def _write_trace_notes(
    files: Sequence[str | Path], platform: Platform, path: Path, before: TraceReport, names: set[str]
) -> tuple[str, ...]:
    """What a reader of the corrections has to know: how well steps that were not fitted to are predicted with them."""
    notes = []
    if names - {platform.device.name}:
        notes.append(f"the trace is of '{', '.join(sorted(names))}' and {platform.key} is a '{platform.device.name}'")
    # as shipped: launch calls that scale a profile would take back what was corrected
    after = analyse_traces(files, TraceOptions(platform=load_platform(str(path)), host=PLATFORM_HOST, host_scale=1.0))
    errors = [_list_errors(report) for report in (before, after)]
    if not errors[0]:
        return (*notes, "one step only: there is none to check the corrections on, and errors are of the step itself")
    old, new = (100 * sum(map(abs, one)) / len(one) for one in errors)
    return (
        *notes, f"{len(errors[0])} steps that were not fitted to: mean error {old:.1f} % before, {new:.1f} % with them",
    )  # fmt: skip


def _list_errors(report: TraceReport) -> list[float]:
    """Relative errors of the steps that were not fitted to."""
    errors = []
    for rank in report.ranks:
        assert rank.attribution is not None
        steps = zip(rank.attribution.steps, _find_fitted_steps(rank).tolist(), strict=True)
        errors += [step.error for step, fitted in steps if not fitted]
    return errors

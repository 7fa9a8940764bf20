"""A traced run of a GPU that is built in: by how much its steps correct the shipped models of kernels and host, checked
on steps that took no part in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.calibration.refine import FamilyCorrection, Refined, shrink_factor, write_refined_platform
from traincast.hardware.device import HOST
from traincast.hardware.platform import Platform, load_platform
from traincast.traces.overheads.extraction import TYPES as OVERHEAD_TYPES
from traincast.traces.replay.analysis import PLATFORM_HOST, TraceOptions, analyse_traces
from traincast.traces.replay.attribution import Attribution
from traincast.traces.replay.kernels import KEPT
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.errors import TraincastError

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
    before = analyse_traces(files, TraceOptions(platform=platform, host=PLATFORM_HOST))
    rows = tuple(_make_correction(family, times) for family, times in sorted(_sum_times(before).items()))
    if not rows:
        raise TraincastError(
            f"the traces have no kernel that {key} has a model for; record shapes (record_shapes=True)"
        )
    names = {rank.linked.trace.device_name for rank in before.ranks} - {""}
    path = write_refined_platform(out, key, ", ".join(sorted(names)) or "traces", rows)
    return Refined(key, path, rows, _write_notes(files, platform, path, before, names))


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


def _write_notes(
    files: Sequence[str | Path], platform: Platform, path: Path, before: TraceReport, names: set[str]
) -> tuple[str, ...]:
    """What a reader of the corrections has to know: how well steps that were not fitted to are predicted with them."""
    notes = []
    if names - {platform.device.name}:
        notes.append(f"the trace is of '{', '.join(sorted(names))}' and {platform.key} is a '{platform.device.name}'")
    after = analyse_traces(files, TraceOptions(platform=load_platform(str(path)), host=PLATFORM_HOST))
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

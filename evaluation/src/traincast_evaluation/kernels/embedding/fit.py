"""Fits the rates of embedding kernels to those of the DLRM studies and of two FBGEMM jobs, then to whole lookups.

Damped least squares on log time, in plain numpy. Kernels that were timed by themselves tell the rates of memory; whole
lookups (`embedding.lookups`) then tell those of links, caches and ATen's kernels, and what a stopwatch on the host
adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from traincast.costs.kernels.contract import Calls, Chips
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.embedding.model import (
    DOMAIN_SIZES,
    PLACES,
    SPREAD_GROUPS,
    UNMEASURED,
    WATCHES,
    EmbeddingModel,
    EmbeddingParameters,
    Watches,
    list_domain_sizes,
    name_spread_group,
)
from traincast.costs.kernels.embedding.physics import Rates, estimate_embedding_seconds
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.metrics import compute_mean_error_percent, is_within_interval
from traincast_evaluation.kernels.embedding.lookups import FILES as WHOLE_FILES
from traincast_evaluation.kernels.embedding.lookups import WholeLookup, WholeLookups, uses_links
from traincast_evaluation.kernels.embedding.measurements import (
    STUDY_FILE,
    TRACES_FILE,
    EmbeddingSamples,
    read_embedding,
)
from traincast_evaluation.kernels.fit import UNJUDGED_SPREAD, ModelTraining
from traincast_evaluation.kernels.samples import Measurements
from traincast_evaluation.solve import compute_spread_90

FITTED = (
    "start_seconds", "update_start_seconds", "read_share", "scattered_write_share", "sorted_write_share",
    "l2_bytes_per_clock", "long_row_seconds", "long_row_l2_share", "lookup_seconds", "lookup_l2_seconds",
)  # fmt: skip
"""Rates fitted together. `empty_block_cycles` is seen in one of an update's two kernels only, and read off that."""
FITTED_TO_WHOLE = (
    "select_seconds", "select_dram_seconds", "gather_share", "host_read_share", "host_update_share", "peer_share",
    "fused_write_share", "gradient_write_share", "fill_cycles",
)  # fmt: skip
"""Rates that only whole lookups tell."""
_KNEE = 0.1  # residuals beyond count linearly (Huber): bags of the smallest job are not known
_TOWARDS_START = 0.02  # decides only what the rows leave open
_STEP = 1e-4  # of log rates, either side, for a slope
_LONGEST_STEP = 0.3  # of log rates: no rate changes by more than a third at once
_ROUNDS = 60  # of the method, at most
_STILL = 1e-7  # of the loss: a step that gains no more is the last
_SLACK = 1e-6  # alongside the limits of what was measured, against rounding
LEAST_SECONDS = 50e-6
"""Kernels from here on are reported apart: shorter ones are mostly their start."""


def fit_embedding(data: Measurements, start: Rates | None = None) -> EmbeddingModel:
    """The model of kernel times. It keeps the rates of `start` that no row tells; spreads are those of the roofline.

    Deterministic.
    """
    rates = fit_rates(data, start or Rates())
    sigma = np.full(len(SPREAD_GROUPS), UNMEASURED)
    return EmbeddingModel(EmbeddingParameters(rates, sigma, UNMEASURED, *_measured(_by_device(data))))


def fit_to_whole(model: EmbeddingModel, lookups: WholeLookups) -> EmbeddingModel:
    """The model with the rates that only whole lookups tell, and with what their stopwatches add."""
    rates, watches = fit_rates_to_whole(lookups, model.parameters_.rates)
    return EmbeddingModel(replace(model.parameters_, rates=rates, watches=watches))


def fit_rates(data: Measurements, start: Rates) -> Rates:
    """The rates that meet the measured times best in relative error; `start` where no row tells."""
    begin = np.log([getattr(start, name) for name in FITTED])
    parts = [(data.calls.take(data.device == i), device, data.device == i) for i, device in enumerate(data.devices)]
    measured = np.log(data.seconds)

    def residuals(log_rates: FloatArray) -> FloatArray:
        rates, error = _rates(start, log_rates), np.empty(len(measured))
        for calls, device, mine in parts:
            error[mine] = np.log(estimate_embedding_seconds(calls, device, rates)) - measured[mine]
        return np.concatenate([error, _TOWARDS_START * (log_rates - begin)])

    return _rates(start, _least_squares(residuals, begin, _top(FITTED)))


def fit_rates_to_whole(lookups: WholeLookups, start: Rates) -> tuple[Rates, Watches]:
    """The rates of `FITTED_TO_WHOLE` and what the stopwatch adds, which meet whole lookups best in relative error."""
    watches = Watches()
    begin = np.log([*(getattr(start, name) for name in FITTED_TO_WHOLE), *(watches.of(name) for name in WATCHES[1:])])
    measured = np.log(lookups.measured)

    def told(logs: FloatArray) -> tuple[Rates, Watches]:
        count = len(FITTED_TO_WHOLE)
        return _rates(start, logs[:count], FITTED_TO_WHOLE), Watches(*np.exp(logs[count:]).tolist())

    def residuals(logs: FloatArray) -> FloatArray:
        error = np.log(lookups.seconds(*told(logs))) - measured
        return np.concatenate([error, _TOWARDS_START * (logs - begin)])

    return told(_least_squares(residuals, begin, _top((*FITTED_TO_WHOLE, *WATCHES[1:]))))


def _top(names: Sequence[str]) -> FloatArray:
    """The logarithm of what each rate can be at most: shares are at most one."""
    return np.array([0.0 if name.endswith("_share") else np.inf for name in names])


def _rates(start: Rates, log_rates: FloatArray, names: tuple[str, ...] = FITTED) -> Rates:
    return replace(start, **{name: float(value) for name, value in zip(names, np.exp(log_rates), strict=True)})


def _least_squares(residuals: Callable[[FloatArray], FloatArray], begin: FloatArray, top: FloatArray) -> FloatArray:
    """Levenberg and Marquardt's method with Huber's weights; never beyond `top`."""
    place, damping = begin, 1e-3
    error = residuals(place)
    for _ in range(_ROUNDS):
        slope = np.stack([_slope(residuals, place, i) for i in range(len(place))], axis=1)
        weight = np.minimum(1.0, _KNEE / np.maximum(np.abs(error), 1e-12))
        normal = slope.T @ (weight[:, None] * slope)
        pull = slope.T @ (weight * error)
        step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
        trial = np.minimum(place + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP), top)
        tried = residuals(trial)
        before, after = _loss(error), _loss(tried)
        if after >= before:
            damping *= 10.0
            continue
        place, error, damping = trial, tried, max(0.3 * damping, 1e-9)
        if before - after < _STILL * before:
            break
    return place


def _slope(residuals: Callable[[FloatArray], FloatArray], place: FloatArray, index: int) -> FloatArray:
    aside = np.zeros(len(place))
    aside[index] = _STEP
    return np.asarray((residuals(place + aside) - residuals(place - aside)) / (2.0 * _STEP))


def _loss(error: FloatArray) -> float:
    size = np.abs(error)
    return float(np.sum(np.where(size < _KNEE, 0.5 * size**2, _KNEE * (size - 0.5 * _KNEE))))


def _by_device(data: Measurements) -> list[tuple[Device, Calls]]:
    return [(device, data.calls.take(data.device == index)) for index, device in enumerate(data.devices)]


def _measured(parts: Sequence[tuple[Device, Calls]]) -> tuple[Chips, FloatArray]:
    """The chips of measurements, and the limits of what was measured on each."""
    cards: list[Device] = []
    for device, _ in parts:
        if Chips.of(cards).find(device) < 0:
            cards.append(device)
    chips, kinds = Chips.of(cards), len(EMBEDDING.kinds)
    limits = np.full((len(cards), kinds, PLACES, 2, DOMAIN_SIZES), np.nan)
    for device, calls in parts:
        chip, sizes, place = chips.find(device), list_domain_sizes(calls), calls["host"].astype(np.int64)
        for kind, where in np.unique(np.stack([calls.kind, place], axis=1), axis=0).tolist():
            mine, known = (calls.kind == kind) & (place == where), limits[chip, kind, where]
            known[0] = np.fmin(known[0], sizes[:, mine].min(axis=1) - _SLACK)
            known[1] = np.fmax(known[1], sizes[:, mine].max(axis=1) + _SLACK)
    return chips, limits


class EmbeddingTraining(ModelTraining[EmbeddingSamples, EmbeddingModel]):
    """Rates of memory and starts of kernels."""

    profile: ClassVar[str] = "embedding"
    sources: ClassVar[tuple[str, ...]] = (
        "owensgroup/ml_perf_model @ 5b2522a0 (BSD-3-Clause)",
        "facebookresearch/param @ 1e115ffc (MIT)",
        "facebookresearch/HolisticTraceAnalysis @ f4d0062c (MIT)",
        "NVIDIA/recsys-examples, benchmark of dynamicemb, several commits (Apache-2.0)",
        "SJTU-IPADS/ugache @ 8bdef6ec (Apache-2.0)",
        "linkedin/Liger-Kernel @ ead96b61 (BSD-2-Clause)",
    )
    files: ClassVar[tuple[str, ...]] = (STUDY_FILE, TRACES_FILE, *WHOLE_FILES)

    def read(self, data: Path) -> EmbeddingSamples:
        """All kernels of both files, and whole lookups."""
        return read_embedding(data)

    def fit(self, samples: EmbeddingSamples) -> EmbeddingModel:
        """The model of these samples."""
        model = fit_embedding(samples.measurements(), samples.start)
        seen = [lookup for lookup in samples.whole if not lookup.held_out]
        return fit_to_whole(model, WholeLookups(seen)) if seen else model

    def calibrate(self, fitted: EmbeddingModel, samples: EmbeddingSamples, seen: BoolArray) -> EmbeddingModel:
        """Spreads from the held-out samples: the others are too few to leave some of them out. `judge_spreads` keeps
        a sample from judging itself."""
        seconds, _ = samples.predicted(fitted.predict)
        sigma, whole = fit_spreads(samples, seconds, ~seen), WholeLookups(samples.whole)
        if samples.whole:
            sigma[SPREAD_GROUPS.index("links")] = fit_link_spread(fitted, samples.whole)
        chips, limits = _measured([*_by_device(samples.measurements()), *whole.measurements()])
        return EmbeddingModel(
            replace(fitted.parameters_, sigma=sigma, unseen_sigma=UNJUDGED_SPREAD, chips=chips, limits=limits)
        )

    def provenance(self, fitted: EmbeddingModel, samples: EmbeddingSamples) -> dict[str, Any]:
        """With kernels above 50 us apart, and intervals that other shapes tell."""
        seconds, _ = samples.predicted(fitted.predict)
        sigma = judge_spreads(samples, seconds)
        judged, long = ~np.isnan(sigma), samples.held_out & (samples.seconds >= LEAST_SECONDS)
        inside = is_within_interval(seconds[judged], samples.seconds[judged], sigma[judged])
        whole = WholeLookups(samples.whole)
        shown = whole.seconds(fitted.parameters_.rates, fitted.parameters_.watches)
        return {
            **super().provenance(fitted, samples),
            "whole_lookups_fitted": int((~whole.held_out).sum()),
            "whole_lookups_held_out": int(whole.held_out.sum()),
            "mean_error_percent_whole_held_out": _mean_error(shown[whole.held_out], whole.measured[whole.held_out]),
            "rows_held_out_above_50_us": int(long.sum()),
            "mean_error_percent_held_out_above_50_us": compute_mean_error_percent(seconds[long], samples.seconds[long]),
            "interval_coverage_held_out": float(np.mean(inside)),
            "interval_coverage_rows": int(judged.sum()),
            "devices": sorted({device.key for device in samples.devices}),
            # in the words of the shipped profile (today `embedding.measurements` and `embedding.lookups`)
            "seed": "kernels: none, rows are set apart by shape, rank and step, see traincast.fit.embedding_data; "
            "whole lookups: a third of the configurations, see traincast.kernels.embedding.whole.held_back",
        }


TRAINING = EmbeddingTraining()


def fit_link_spread(model: EmbeddingModel, lookups: Sequence[WholeLookup]) -> float:
    """Log-sigma of what waits for links, from the held-out ones among these lookups."""
    judged = WholeLookups([lookup for lookup in lookups if lookup.held_out and uses_links(lookup)])
    seconds = judged.seconds(model.parameters_.rates, model.parameters_.watches)
    return compute_spread_90(seconds, judged.measured) if len(seconds) else UNJUDGED_SPREAD


def _mean_error(predicted: FloatArray, measured: FloatArray) -> float | None:
    return compute_mean_error_percent(predicted, measured) if len(measured) else None


def fit_spreads(samples: EmbeddingSamples, seconds: FloatArray, use: BoolArray) -> FloatArray:
    """Log-sigma of each group of kernels from the samples to use; that of a chip never judged where there are none."""
    group = name_spread_group(samples.calls, seconds)
    chosen = [use & (group == index) for index in range(len(SPREAD_GROUPS))]
    return np.array([
        compute_spread_90(seconds[mine], samples.seconds[mine]) if mine.any() else UNJUDGED_SPREAD for mine in chosen
    ])  # fmt: skip


def judge_spreads(samples: EmbeddingSamples, seconds: FloatArray) -> FloatArray:
    """The log-sigma of every held-out sample as other shapes tell it, so that no interval is judged by a sample that
    set it; not a number for fitted samples, and where its group has no other held-out shape."""
    group = name_spread_group(samples.calls, seconds)
    sigma = np.full(len(seconds), np.nan)
    for shape in np.unique(samples.shape[samples.held_out].astype(str)):
        mine = samples.held_out & (samples.shape == shape)
        others = samples.held_out & ~mine
        known = np.array([bool((others & (group == index)).any()) for index in range(len(SPREAD_GROUPS))])
        sigma[mine] = np.where(known, fit_spreads(samples, seconds, others), np.nan)[group[mine]]
    return sigma

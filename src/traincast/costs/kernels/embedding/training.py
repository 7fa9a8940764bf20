"""Fits the rates of embedding kernels to those of the DLRM studies and of two FBGEMM jobs, then to whole lookups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from traincast.costs.kernels.embedding.measured import (
    STUDY_FILE,
    TRACES_FILE,
    EmbeddingSamples,
    read_embedding,
)
from traincast.costs.kernels.embedding.model import EmbeddingModel, spread_group
from traincast.costs.kernels.embedding.parameters import SPREAD_GROUPS
from traincast.costs.kernels.embedding.public_lookups import FILES as WHOLE_FILES
from traincast.costs.kernels.embedding.whole import WholeLookup, WholeLookups, uses_links
from traincast.costs.kernels.solve import spread_90
from traincast.costs.kernels.training import UNJUDGED_SPREAD, ModelTraining
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.metrics import mean_error_percent, within

LEAST_SECONDS = 50e-6
"""Kernels from here on are reported apart: shorter ones are mostly their start."""


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
        model = EmbeddingModel(start=samples.start).fit(samples.measurements())
        seen = [lookup for lookup in samples.whole if not lookup.held_out]
        return model.fit_whole(WholeLookups(seen)) if seen else model

    def calibrate(self, fitted: EmbeddingModel, samples: EmbeddingSamples, seen: BoolArray) -> EmbeddingModel:
        """Spreads from the held-out samples: the others are too few to leave some of them out. `judged_spreads` keeps
        a sample from judging itself."""
        seconds, _ = samples.predicted(fitted.predict)
        sigma, whole = spreads(samples, seconds, ~seen), WholeLookups(samples.whole)
        if samples.whole:
            sigma[SPREAD_GROUPS.index("links")] = link_spread(fitted, samples.whole)
        return fitted.with_spread(sigma, UNJUDGED_SPREAD, samples.measurements(), whole)

    def provenance(self, fitted: EmbeddingModel, samples: EmbeddingSamples) -> dict[str, Any]:
        """With kernels above 50 us apart, and intervals that other shapes tell."""
        seconds, _ = samples.predicted(fitted.predict)
        sigma = judged_spreads(samples, seconds)
        judged, long = ~np.isnan(sigma), samples.held_out & (samples.seconds >= LEAST_SECONDS)
        inside = within(seconds[judged], samples.seconds[judged], sigma[judged])
        whole = WholeLookups(samples.whole)
        shown = whole.seconds(fitted.fitted.rates, fitted.fitted.watches)
        return {
            **super().provenance(fitted, samples),
            "whole_lookups_fitted": int((~whole.held_out).sum()),
            "whole_lookups_held_out": int(whole.held_out.sum()),
            "mean_error_percent_whole_held_out": _mean_error(shown[whole.held_out], whole.measured[whole.held_out]),
            "rows_held_out_above_50_us": int(long.sum()),
            "mean_error_percent_held_out_above_50_us": mean_error_percent(seconds[long], samples.seconds[long]),
            "interval_coverage_held_out": float(np.mean(inside)),
            "interval_coverage_rows": int(judged.sum()),
            "devices": sorted({device.key for device in samples.devices}),
            # in the words of the shipped profile (today `kernels.embedding.measured`)
            "seed": "kernels: none, rows are set apart by shape, rank and step, see traincast.fit.embedding_data; "
            "whole lookups: a third of the configurations, see traincast.costs.kernels.embedding.whole.held_back",
        }


TRAINING = EmbeddingTraining()


def link_spread(model: EmbeddingModel, lookups: Sequence[WholeLookup]) -> float:
    """Log-sigma of what waits for links, from the held-out ones among these lookups."""
    judged = WholeLookups([lookup for lookup in lookups if lookup.held_out and uses_links(lookup)])
    seconds = judged.seconds(model.fitted.rates, model.fitted.watches)
    return spread_90(seconds, judged.measured) if len(seconds) else UNJUDGED_SPREAD


def _mean_error(predicted: FloatArray, measured: FloatArray) -> float | None:
    return mean_error_percent(predicted, measured) if len(measured) else None


def spreads(samples: EmbeddingSamples, seconds: FloatArray, use: BoolArray) -> FloatArray:
    """Log-sigma of each group of kernels from the samples to use; that of a chip never judged where there are none."""
    group = spread_group(samples.calls, seconds)
    chosen = [use & (group == index) for index in range(len(SPREAD_GROUPS))]
    return np.array([
        spread_90(seconds[mine], samples.seconds[mine]) if mine.any() else UNJUDGED_SPREAD for mine in chosen
    ])  # fmt: skip


def judged_spreads(samples: EmbeddingSamples, seconds: FloatArray) -> FloatArray:
    """The log-sigma of every held-out sample as other shapes tell it, so that no interval is judged by a sample that
    set it; not a number for fitted samples, and where its group has no other held-out shape."""
    group = spread_group(samples.calls, seconds)
    sigma = np.full(len(seconds), np.nan)
    for shape in np.unique(samples.shape[samples.held_out].astype(str)):
        mine = samples.held_out & (samples.shape == shape)
        others = samples.held_out & ~mine
        known = np.array([bool((others & (group == index)).any()) for index in range(len(SPREAD_GROUPS))])
        sigma[mine] = np.where(known, spreads(samples, seconds, others), np.nan)[group[mine]]
    return sigma

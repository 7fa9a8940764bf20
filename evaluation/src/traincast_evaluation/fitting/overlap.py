"""How much longer kernels take alongside a transfer, from a trace in which equal kernels ran with and without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.slowdowns import Pair, find_overlapped_pairs
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError

TRACE = "hta_recsys_a100_rank3of8/kineto_rank3.json.gz"
SOURCE = "facebookresearch/HolisticTraceAnalysis @ f4d0062c (MIT): recommender, rank 3 of 8, A100 40 GB"
_CANDIDATES = np.arange(0.0, 10.05e-6, 0.1e-6)  # seconds, tried one by one


def fit_overlap(data: Path, out: Path, progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Writes `overlap.json` into `out` and returns it."""
    progress("kernels beside transfers", 0.0)
    pairs = find_overlapped_pairs(link_trace(read_kineto(data / "traces" / TRACE)))
    fitted, held = ([pair for pair in pairs if pair.group % 2 == half] for half in (0, 1))
    if not (fitted and held):
        raise TraincastError(
            f"'traces/{TRACE}' has too few kernels that ran alongside a transfer and alone; is it whole?"
        )
    start = find_best_start(fitted)
    profile = {
        "start_us": round(1e6 * start, 1),
        "provenance": {
            "sources": [SOURCE],
            "pairs_fitted": len(fitted),
            "held_out": {
                "pairs": len(held),
                "with": compute_overlap_errors(held, start),
                "without": compute_overlap_errors(held, 0.0),
            },
        },
    }
    (out / "overlap.json").write_text(json.dumps(profile, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    progress("kernels beside transfers", 1.0)
    return profile


def find_best_start(pairs: list[Pair]) -> float:
    """Seconds that a kernel takes longer, with the least mean error of log time."""
    alone, took = _split_columns(pairs)
    wrong = [float(np.mean(np.abs(np.log((start + alone) / took)))) for start in _CANDIDATES]
    return float(_CANDIDATES[int(np.argmin(wrong))])


def compute_overlap_errors(pairs: list[Pair], start: float) -> dict[str, float]:
    """Errors in percent: of the single kernels, and of their sum (`bias`)."""
    alone, took = _split_columns(pairs)
    relative = np.abs((start + alone) / took - 1.0)
    return {
        "gmae": round(100 * float(np.exp(np.mean(np.log(np.maximum(relative, 1e-3))))), 1),
        "mape": round(100 * float(np.mean(relative)), 1),
        "median": round(100 * float(np.median(relative)), 1),
        "worst": round(100 * float(np.max(relative)), 1),
        "bias": round(100 * float((start + alone).sum() / took.sum() - 1.0), 1),
    }


def _split_columns(pairs: list[Pair]) -> tuple[FloatArray, FloatArray]:
    alone, took = np.array([(pair.alone, pair.took) for pair in pairs]).T
    return alone, took

"""Every kernel family against held-out measurements: one table per family, device and split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from traincast.costs.kernels.gemm import GEMM
from traincast.utils.metrics import ErrorRow
from traincast_evaluation.kernels.evaluate import Evaluation
from traincast_evaluation.kernels.families import MEASURED
from traincast_evaluation.suites.dlrm_timeline import evaluate_dlrm_timeline


def evaluate_kernels(data: Path, progress: Callable[[float], None] = lambda _: None) -> list[ErrorRow]:
    """Accuracy rows of all families; `progress` hears the fraction done."""
    rows: list[ErrorRow] = []
    parts = list(_iterate_kernel_evaluations())
    for done, part in enumerate(parts):
        rows += part(data)
        progress((done + 1) / len(parts))
    return rows


def _iterate_kernel_evaluations() -> Iterator[Evaluation]:
    """The suites of every family; kernels of whole DLRM steps stand behind GEMM, of which they mostly are."""
    for measured in MEASURED:
        yield from measured.evaluation_functions()
        if measured.family is GEMM:
            yield evaluate_dlrm_timeline

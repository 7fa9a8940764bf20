"""Every kernel family against held-out measurements: one table per family, device and split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from traincast.evaluation.dlrm_timeline import evaluate_dlrm_timeline
from traincast.evaluation.kernels_attention import evaluate_attention
from traincast.evaluation.kernels_conv import evaluate_conv
from traincast.evaluation.kernels_embedding import evaluate_embedding
from traincast.evaluation.kernels_gemm import evaluate_gemm
from traincast.evaluation.kernels_gemm_timeline import evaluate_gemm_timeline
from traincast.evaluation.kernels_vector import evaluate_elementwise, evaluate_norm, evaluate_softmax
from traincast.evaluation.metrics import ErrorRow

_PARTS = (
    evaluate_gemm,
    evaluate_gemm_timeline,
    evaluate_dlrm_timeline,
    evaluate_elementwise,
    evaluate_softmax,
    evaluate_norm,
    evaluate_conv,
    evaluate_attention,
    evaluate_embedding,
)


def evaluate_kernels(data: Path, progress: Callable[[float], None] = lambda _: None) -> list[ErrorRow]:
    """Accuracy rows of all families; `progress` hears the fraction done."""
    rows: list[ErrorRow] = []
    for done, part in enumerate(_PARTS):
        rows += part(data)
        progress((done + 1) / len(_PARTS))
    return rows

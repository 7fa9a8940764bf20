"""Every kernel family that was measured: what fits its profile, and what compares it with measurements.

From this table follow the kernels of `traincast fit --data` and the rows of `traincast evaluate kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.contract import Family
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.families import BY_NAME
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.rowwise import NORM, SOFTMAX
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast_evaluation.kernels.evaluate import Evaluation
from traincast_evaluation.kernels.fit import Training


@dataclass(frozen=True, slots=True)
class MeasuredFamily:
    """A family with measurements. Functions are named `module:name` within this package and imported when needed.

    Families may share a profile (all that stream memory do): the one that was measured stands here.
    """

    family: Family
    fit: str
    evaluations: tuple[str, ...]

    @property
    def profile(self) -> str:
        """The name of the profile that `fit` writes."""
        return BY_NAME[self.family.name].profile

    def fit_function(self) -> Training:
        """The function that fits the profile."""
        function: Training = _import_object(self.fit)
        return function

    def evaluation_functions(self) -> tuple[Evaluation, ...]:
        """The functions that compare the family with measurements."""
        return tuple(_import_object(name) for name in self.evaluations)


def _import_object(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(f"{__package__}.{module}"), name)


MEASURED: tuple[MeasuredFamily, ...] = (
    MeasuredFamily(
        GEMM,
        "gemm.fit:fit_gemm",
        (
            "gemm.evaluate:evaluate_gemm",
            "gemm.other_sources:evaluate_gemm_timeline",
            "gemm.other_sources:evaluate_experts",
            "gemm.other_sources:evaluate_gemm_training",
            "gemm.other_sources:evaluate_gemm_xla",
        ),
    ),
    MeasuredFamily(ELEMENTWISE, "streaming.fit:TRAINING", ("streaming.evaluate:evaluate_elementwise",)),
    MeasuredFamily(SOFTMAX, "rowwise.fit:SOFTMAX_TRAINING", ("rowwise.evaluate:evaluate_softmax",)),
    MeasuredFamily(NORM, "rowwise.fit:NORM_TRAINING", ("rowwise.evaluate:evaluate_norm",)),
    MeasuredFamily(CONV, "conv.fit:TRAINING", ("conv.evaluate:evaluate_conv",)),
    MeasuredFamily(ATTENTION, "attention.fit:TRAINING", ("attention.evaluate:evaluate_attention",)),
    MeasuredFamily(EMBEDDING, "embedding.fit:TRAINING", ("embedding.evaluate:evaluate_embedding",)),
)
"""In the order in which they are fitted and evaluated."""

"""One run of a published program: on how many GPUs, how many samples, in which type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """`global_batch` samples on `gpus` GPUs together, `gpus_per_node` in a node; `dtype` is that of the dense part
    (fp32, tf32, fp16)."""

    gpus: int
    global_batch: int
    dtype: str
    gpus_per_node: int = 8

    @property
    def half(self) -> bool:
        """Whether the dense part runs in half precision."""
        return self.dtype == "fp16"

    @property
    def element(self) -> str:
        """Element type of the dense part."""
        return "float16" if self.half else "float32"


def count_mlp_parameters(widths: Sequence[int]) -> int:
    """Weights and biases of linear layers from width to width."""
    return sum((fan_in + 1) * fan_out for fan_in, fan_out in zip(widths, widths[1:], strict=False))

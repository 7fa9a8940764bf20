"""The few numbers of a step that no kernel or link measurement tells: shared by all models, GPUs and layouts."""

from __future__ import annotations

from dataclasses import dataclass, field

HALF, NARROW = "16", "8"
"""Bits of the operands of matrix products, as `sustained` names them."""


def _sustained() -> dict[str, float]:
    # blackwell 16 and attention: medians of kernels above 0.3 ms in a loop on B200 (SimuMax's table, as is `grouped`);
    # the others on half of the steps
    return {
        "ampere 16": 1.08, "hopper 16": 1.36, "hopper 8": 1.15, "hopper attention": 1.5, "blackwell 16": 1.38,
        "blackwell 8": 1.07, "blackwell attention": 1.05, "cdna3 16": 2.9, "cdna3 8": 1.74, "cdna3 attention": 1.5,
        "cdna4 8": 1.46, "cdna4 attention": 1.5,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Numbers that steps share.

    `sustained`: how much longer matrix products ("16" and "8" bits) and attention take in long steps, at the clock that
    the board's power allows and in the library of the day, than alone in a benchmark; by architecture. `grouped`: how
    much longer grouped products of experts take than a batched product of the same sizes (`grouped_narrow`: in eight
    bits). `triton`, `flash2`: shares of
    the rate of A100-style matrix instructions that Triton's first and the second flash attention reach, which know no
    newer ones. `rowwise`: how much longer 8-bit products with a scale for every row take than with one for the tensor.

    `beside`: the share of the time of an exchange by which kernels beside it take longer. `module_us`: microseconds
    that the Python of a framework's modules adds to the host time of each kernel it launches. `exchange_us`:
    microseconds of the host per exchange. `meeting_us`: microseconds that a device stands still around an exchange that
    nothing runs beside; `routing_us`: while the counts of tokens of experts reach the host, once a layer.
    """

    sustained: dict[str, float] = field(default_factory=_sustained)
    grouped: float = 1.55
    grouped_narrow: float = 0.65
    triton: float = 0.32
    flash2: float = 0.43
    rowwise: float = 1.95
    beside: float = 0.02
    meeting_us: float = 45.0
    routing_us: float = 3400.0
    module_us: float = 42.0
    exchange_us: float = 5.0


SHARED = Constants()

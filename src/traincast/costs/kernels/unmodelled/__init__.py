"""Ops that nobody has modelled: the larger of their bytes and their flops, marked as estimated."""

from __future__ import annotations

from traincast.costs.kernels.call import Family
from traincast.costs.kernels.record import FamilyRecord

_FIELDS = ("elements", "bytes_read", "bytes_written", "tensors", "flops")
UNMODELLED = Family("unmodelled", ("stream", "product", "factorisation"), _FIELDS)
"""Ops whose flops follow from their shapes: no contraction, products, or a factorisation of matrices."""
OPAQUE = Family("opaque", ("stream", "product"), _FIELDS)
"""Ops of strangers: what they compute cannot be known from shapes, so flops are a guess."""


def _record(family: Family, sigma: float) -> FamilyRecord:
    return FamilyRecord(
        family=family, package=__name__, lowering=(), roofline="roofline:unmodelled_seconds", roofline_sigma=sigma
    )


RECORDS = (
    _record(UNMODELLED, 0.7),  # a factor of two either way: assumed of an op that nobody measured
    _record(OPAQUE, 1.4),  # a factor of four: bytes and shapes may say nothing of what is computed
)

"""Ops whose cost their author gives."""

from __future__ import annotations

from traincast.costs.kernels.call import Family
from traincast.costs.kernels.record import FamilyRecord

GIVEN = Family("given", ("given",), ("seconds", "flops", "bytes"))
RECORDS = (
    FamilyRecord(
        family=GIVEN, package=__name__, lowering=(), roofline="roofline:given_seconds",
        roofline_sigma=0.2,  # assumed: an author knows an op better than its shapes tell
    ),
)  # fmt: skip

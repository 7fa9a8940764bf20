"""Collectives: exchanges between ranks, whose time is that of the meeting (`traincast.costs.collectives`)."""

from __future__ import annotations

from traincast.costs.kernels.call import Family
from traincast.costs.kernels.record import FamilyRecord
from traincast.ir.collectives import COLLECTIVES

COLLECTIVE = Family(
    "collective",
    tuple(record.name for record in COLLECTIVES.values() if not record.made_of),
    # `bytes` is the larger buffer of one rank (all_gather: the gathered output; reduce_scatter: the input; all_to_all:
    # the whole send buffer; all_to_all_v: see `collectives.even_bytes`); `ranks` take part, spread evenly over `nodes`
    ("bytes", "ranks", "nodes"),
)
RECORD = FamilyRecord(family=COLLECTIVE, package=__name__)

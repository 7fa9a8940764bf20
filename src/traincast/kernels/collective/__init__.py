"""Collectives: exchanges between ranks, whose time is that of the meeting (`traincast.collectives`)."""

from __future__ import annotations

from traincast.kernels.call import Family
from traincast.kernels.record import FamilyRecord

COLLECTIVE = Family(
    "collective",
    (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v",
        "broadcast", "reduce", "send_recv", "barrier",
    ),
    # `bytes` is the larger buffer of one rank (all_gather: the gathered output; reduce_scatter: the input; all_to_all:
    # the whole send buffer; all_to_all_v: see `collectives.even_bytes`); `ranks` take part, spread evenly over `nodes`
    ("bytes", "ranks", "nodes"),
)  # fmt: skip
RECORD = FamilyRecord(family=COLLECTIVE, package=__name__)

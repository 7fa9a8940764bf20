"""Collectives of gloo as microbenchmarks: which, at which sizes, and the calls themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from traincast.errors import unknown
from traincast.trials.exchange import all_gather, reduce_scatter

_ITEM = 4  # bytes of fp32


def collective_work(kind: str, message_bytes: int, rank: int, ranks: int) -> Callable[[], object]:
    """One call of a collective with a message of so many bytes, which means what `workload.collectives` says: the whole
    buffer that is reduced, sent by a rank, or gathered."""
    elements = max(ranks, message_bytes // _ITEM // ranks * ranks)
    whole = torch.ones(elements)
    part, other = torch.ones(elements // ranks), torch.empty(elements)
    works: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX),  # a sum would grow without end
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: all_gather(other, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole, dist.ReduceOp.MAX),
    }
    if kind not in works:
        raise unknown("collective", kind, works, f"Choose from {', '.join(works)}.")
    return works[kind]

"""Collectives: communication between ranks, whose time is that of the whole group (`traincast.costs.collectives`)."""

from __future__ import annotations

from functools import lru_cache

from traincast.costs.kernels.contract import Family, FamilyRecord
from traincast.costs.kernels.registry import Item, LoweringContext, get_compute_type, lowers
from traincast.costs.kernels.streaming.launches import make_memcpy
from traincast.ir.collectives import COLLECTIVE_OPS, COLLECTIVES, LIBRARY_OPS, Route
from traincast.ir.ops import Scalar, Signature
from traincast.utils.errors import TraincastError, make_unknown_error

COLLECTIVE = Family(
    "collective",
    tuple(record.name for record in COLLECTIVES.values() if not record.made_of),
    # `bytes` is the larger buffer of one rank (all_gather: the gathered output; reduce_scatter: the input; all_to_all:
    # the whole send buffer; all_to_all_v: see `collectives.even_bytes`); `ranks` take part, spread evenly over `nodes`
    ("bytes", "ranks", "nodes"),
)
RECORD = FamilyRecord(family=COLLECTIVE, package=__name__, lowering=("",))


@lowers(*COLLECTIVE_OPS, *LIBRARY_OPS)
def lower_collective(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for the group; alone in its group, a rank copies its input to the output, if they differ."""
    kind, group, size = (signature.scalar(name) for name in ("collective", "group", "bytes"))
    record = COLLECTIVES.get(str(kind))
    if record is not None and record.route is Route.PAIR and signature.scalar("source") is not None:
        group = (signature.scalar("source"), signature.scalar("target"))
    nodes = _count_nodes(group, context.gpus_per_node) if isinstance(group, tuple) else 0
    if not isinstance(kind, str) or not isinstance(size, int) or not isinstance(group, tuple) or not nodes:
        raise TraincastError(
            f"{signature.name} does not say what it communicates (collective, group, bytes); capture it"
        )
    if record is None or kind not in COLLECTIVE.kinds:
        raise make_unknown_error("collective", kind, COLLECTIVE.kinds, f"Correct {signature.name}.")
    if len(group) < 2:
        return () if record.in_place or size == 0 else (make_memcpy("d2d", size),)
    compute = get_compute_type(signature.inputs[0]) if signature.inputs else "fp32"
    return (COLLECTIVE.call(kind, compute, bytes=size, ranks=len(group), nodes=nodes),)


@lru_cache(maxsize=1024)  # a group of a thousand ranks is in as many programs
def _count_nodes(group: tuple[Scalar, ...], gpus_per_node: int) -> int:
    """How many nodes the ranks of a group are on; 0 for a group that is not made of ranks."""
    ranks = [rank for rank in group if isinstance(rank, int)]
    if not ranks or len(ranks) != len(group):
        return 0
    return len({rank // gpus_per_node for rank in ranks}) if gpus_per_node else 1

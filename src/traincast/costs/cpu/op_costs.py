"""The ops of a step as a measured CPU runs them, each priced where its operands are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from traincast.costs.cpu.caches import Found, Operand, list_operands
from traincast.costs.cpu.cpu_ops import make_cpu_ops, runs_no_kernel
from traincast.costs.cpu.features import count_op_flops, count_touched_bytes, describe_op, get_family, get_kind
from traincast.costs.cpu.profile import Profile
from traincast.ir.ops import Op, Signature
from traincast.ir.program import Program
from traincast.utils.totals import sum_by_key

STEP_SIGMA = 0.03
"""Relative deviation of a whole step that no sum of parts explains: repeated calibrations of one machine differ so."""


class PricedOp(NamedTuple):
    """One CPU op out of a captured one: seconds, the deviation of their logarithm, whether its kind was measured, and
    its multiplications and additions where it is a GEMM or a convolution."""

    op: Op
    kind: str
    seconds: float
    sigma: float
    known: bool
    flops: float = 0.0


def read_table_access(program: Program, access: Sequence[str]) -> dict[int, str]:
    """The access distribution of every op that works on an embedding table, by op number. Tables are told apart by the
    order of their lookups in the forward pass."""
    if not access:
        return {}
    by_storage: dict[int, str] = {}
    distributions: dict[int, str] = {}
    remaining = list(access)
    for op in program.ops:
        kind = get_kind(op.signature)
        if kind in ("_embedding_bag", "embedding") and remaining and op.inputs[0].storage not in by_storage:
            distribution = remaining.pop(0)
            by_storage[op.inputs[0].storage] = by_storage[op.inputs[1].storage] = distribution
        if get_family(kind).startswith("embedding"):
            known = [by_storage[tensor.storage] for tensor in op.inputs if tensor.storage in by_storage]
            if known:
                distributions[op.index] = known[0]
                for tensor in op.outputs:
                    by_storage.setdefault(tensor.storage, known[0])
    return distributions


def price_ops(program: Program, profile: Profile, access: Sequence[str] = (), *, ranks: int = 1) -> list[PricedOp]:
    """Every op that a CPU runs in a step, while as many ranks compute on cores of one machine. `access` says of every
    embedding table which rows its lookups touch."""
    distributions = read_table_access(program, access)
    rows = list_operands(
        program, 2 * profile.caches.l3, lambda op, signature: count_touched_bytes(signature, distributions.get(op, ""))
    )
    return [
        _price_op(profile, op, signature, rows[op.index], distributions.get(op.index, ""), ranks)
        for op in program.ops
        for signature in make_cpu_ops(op.signature)
    ]


def collect_op_deviations(cost: Sequence[PricedOp], host: float, profile: Profile) -> dict[str, float]:
    """Standard deviations of a step in seconds, which are independent: ops of one kind err alike, kinds and the host
    (`host` seconds) apart."""
    total = host + sum(one.seconds for one in cost)
    errors = sum_by_key((one.kind, one.sigma * one.seconds) for one in cost)
    return {
        "kernels": math.hypot(*errors.values()),
        "host": profile.host_spread * host,
        "sum_of_parts": STEP_SIGMA * total,
    }


def _price_op(profile: Profile, op: Op, signature: Signature, found: Found, distribution: str, ranks: int) -> PricedOp:
    kind = get_kind(signature)
    if runs_no_kernel(signature):
        return PricedOp(op, kind, 0.0, 0.0, True)
    row, code = found
    if len(op.signature.inputs) != len(signature.inputs):  # one tensor of a list, or one part of a fused op
        farthest = max((operand.distance for operand in row), default=0)
        row = tuple(Operand(spec.nbytes, farthest) for spec in (*signature.inputs, *signature.outputs))
    features = describe_op(signature, row, profile.caches, distribution, code=code, inside=True)
    seconds, sigma, known = profile.seconds(features)
    longer = (1.0 + profile.longer) * profile.crowding.factor(ranks, kind)
    return PricedOp(op, kind, longer * seconds, sigma, known, count_op_flops(features))

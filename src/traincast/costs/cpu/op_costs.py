"""The ops and host events of a step as a measured CPU runs them, each priced where its operands are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from traincast.costs.cpu.features import (
    Found,
    Operand,
    count_op_flops,
    count_touched_bytes,
    describe_op,
    get_family,
    get_kind,
    list_operands,
)
from traincast.costs.cpu.profile import Profile
from traincast.ir.collectives import COLLECTIVE_OPS
from traincast.ir.ops import Op, Phase, Scalar, Signature, TensorSpec
from traincast.ir.program import Program
from traincast.utils.arrays import FloatArray
from traincast.utils.metrics import sum_by_key

VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "t", "transpose", "view", "_unsafe_view", "_reshape_alias", "reshape", "slice", "select", "expand", "permute",
        "unsqueeze", "squeeze", "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "narrow",
        "lift_fresh", "chunk", "diagonal", "unfold", "view_as_real", "flatten", "empty", "empty_like", "new_empty",
        "empty_strided", "new_empty_strided", "_local_scalar_dense", "is_pinned",
        "_indices", "_values", "_sparse_coo_tensor_with_dims_and_tensors",
    )
)  # fmt: skip
"""Ops that touch no element: they cost host time only."""

_TRANSFERS = ("aten::_to_copy", "aten::copy_")
_ELSEWHERE = ("cuda::", "c10d::", "_c10d_functional::")  # synchronisation, and collectives, which gloo's thread runs
_FOREACH = "aten::_foreach_"
# CUDA's op -> the CPU's, where arguments and shapes are the same
_RENAMED = {
    "aten::cudnn_batch_norm": "aten::native_batch_norm",
    "aten::cudnn_batch_norm_backward": "aten::native_batch_norm_backward",
    "aten::cudnn_convolution": "aten::convolution",
    "aten::_scaled_dot_product_efficient_attention": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable": "aten::_scaled_dot_product_flash_attention_for_cpu",
}


def make_cpu_ops(signature: Signature) -> tuple[Signature, ...]:
    """What the CPU runs for an op of the capture; nothing for views, transfers, synchronisation and collectives."""
    name = signature.name
    if name in VIEWS or name.startswith(_ELSEWHERE) or _is_transfer(signature):
        return ()
    if name.startswith(_FOREACH):
        return _split_foreach(signature)
    if name == "aten::native_dropout":
        return _replace_dropout(signature)
    if name == "aten::native_dropout_backward":
        return (_replace_elementwise("mul", signature.inputs[:1] * 2, signature.outputs[0]),)
    return (replace(signature, name=_RENAMED.get(name, name)),)


def runs_no_kernel(signature: Signature) -> bool:
    """Whether an op that the CPU runs touches no element: to zero a sparse gradient is to forget its rows."""
    return signature.name == "aten::zero_" and signature.scalar("self_layout") == "sparse_coo"


def _is_transfer(signature: Signature) -> bool:
    """A copy between host and GPU: on a CPU the tensor is there already."""
    places = {spec.device.partition(":")[0] for spec in (*signature.inputs, *signature.outputs)}
    return signature.name in _TRANSFERS and len(places) > 1


def _split_foreach(signature: Signature) -> tuple[Signature, ...]:
    """Optimizers on a CPU loop over their parameters."""
    counts = [count for _, count in signature.groups]
    many = max(counts, default=0)
    if not many:
        return ()
    starts = [sum(counts[:position]) for position in range(len(counts))]
    name = "aten::" + signature.name.removeprefix(_FOREACH)
    scalars = tuple((key, value) for key, value in signature.scalars if key != "scalars")
    ops = []
    for index in range(many):
        inputs = tuple(
            signature.inputs[start + (index if count == many else 0)]
            for start, count in zip(starts, counts, strict=True)
            if count
        )
        groups = tuple((group, 1) for group, count in signature.groups if count)
        ops.append(Signature(name, inputs, inputs[:1], _count_numbers(scalars), groups, signature.overload))
    return tuple(ops)


def _count_numbers(scalars: tuple[tuple[str, Scalar], ...]) -> tuple[tuple[str, Scalar], ...]:
    return tuple((key, value) for key, value in scalars if isinstance(value, (int, float)))


def _replace_dropout(signature: Signature) -> tuple[Signature, ...]:
    """A mask drawn, scaled in place, and applied."""
    spec = signature.inputs[0]
    return (
        _replace_elementwise("bernoulli_", (spec,), spec),
        _replace_elementwise("div_", (spec,), spec),
        _replace_elementwise("mul", (spec, spec), spec),
    )


def _replace_elementwise(name: str, inputs: tuple[TensorSpec, ...], output: TensorSpec) -> Signature:
    return Signature(f"aten::{name}", inputs, (output,), (), tuple(("", 1) for _ in inputs))


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


HOST_EVENTS = ("step", "op", "view", "backward", "accumulate", "optimizer", "reduced", "collective")
"""A step, a top-level op outside backward, a view, an autograd node, a gradient that is accumulated, an op of the
optimizer; and of several ranks, a gradient that DDP has all-reduced, and a collective that is called."""


def count_host_events(program: Program) -> FloatArray:
    """How often each of `HOST_EVENTS` occurs in a step."""
    numbers = [event for event, _ in _list_events(program)]
    return np.bincount(numbers, minlength=len(HOST_EVENTS)).astype(np.float64)


def sum_host_seconds_by_op(program: Program, profile: Profile) -> FloatArray:
    """Seconds of the host before each op of a program; those of a top-level op stand before its first one."""
    prices = np.array([profile.host.get(name, 0.0) for name in HOST_EVENTS])
    events, places = np.array(list(_list_events(program)), dtype=np.int64).reshape(-1, 2).T
    last = max(program.num_ops - 1, 0)
    seconds = np.bincount(np.minimum(places, last), weights=prices[events], minlength=program.num_ops)
    return seconds.astype(np.float64)


def _list_events(program: Program) -> Iterator[tuple[int, int]]:
    """(event, op before which it happens) of a step."""
    number = {name: place for place, name in enumerate(HOST_EVENTS)}
    yield number["step"], 0
    for op in program.ops:
        if op.name in COLLECTIVE_OPS:
            yield number["collective"], op.index
        elif op.name in VIEWS:
            yield number["view"], op.index
        elif op.phase is Phase.OPTIMIZER or "Optimizer." in program.scopes[op.scope].name:
            yield from ((number["optimizer"], op.index) for _ in make_cpu_ops(op.signature))
    reduced = any(op.signature.scalar("collective") == "all_reduce" for op in program.ops)
    for scope in program.scopes:
        if scope.name.startswith("Optimizer."):
            continue
        if scope.phase is not Phase.BACKWARD:
            yield number["op"], scope.first_op
        elif "AccumulateGrad" in scope.name:
            yield number["accumulate"], scope.first_op
            if reduced:
                yield number["reduced"], scope.first_op
        else:
            yield number["backward"], scope.first_op

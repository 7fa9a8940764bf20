"""A step on a machine whose kernels run on the host thread: the sum of its ops, each where its operands lie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from traincast.costs.cpu.caches import Found, Operand, operands
from traincast.costs.cpu.cpu_ops import VIEWS, cpu_ops, runs_no_kernel
from traincast.costs.cpu.features import describe, family_of, kind_of, touched_bytes
from traincast.costs.cpu.profile import Profile
from traincast.ir.collectives import COLLECTIVE_OPS
from traincast.ir.ops import Op, Phase, Signature
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.utils.arrays import FloatArray
from traincast.utils.quantiles import Z90
from traincast.utils.results import Records, Result
from traincast.utils.totals import totals

HOST_EVENTS = ("step", "op", "view", "backward", "accumulate", "optimizer", "reduced", "collective")
"""What the host pays for beside kernels: a step, a top-level op outside backward, a view, an autograd node, a gradient
that is accumulated, an op of the optimizer; and of several ranks, a gradient that DDP has all-reduced, and a collective
that is called."""
_STEP_SIGMA = 0.03  # of a whole step: what no sum of parts explains (repeated calibrations of one machine differ so)


def host_events(program: Program) -> FloatArray:
    """How often each of `HOST_EVENTS` occurs in a step."""
    counts = Counter({"step": 1})
    for op in program.ops:
        if op.name in COLLECTIVE_OPS:
            counts["collective"] += 1
        elif op.name in VIEWS:
            counts["view"] += 1
        elif op.phase is Phase.OPTIMIZER or "Optimizer." in program.scopes[op.scope].name:
            counts["optimizer"] += len(cpu_ops(op.signature))
    for scope in program.scopes:
        if scope.name.startswith("Optimizer."):
            continue
        if scope.phase is not Phase.BACKWARD:
            counts["op"] += 1
        else:
            counts["accumulate" if "AccumulateGrad" in scope.name else "backward"] += 1
    if any(op.signature.scalar("collective") == "all_reduce" for op in program.ops):
        counts["reduced"] = counts["accumulate"]
    return np.array([float(counts[name]) for name in HOST_EVENTS])


@dataclass(frozen=True, repr=False, kw_only=True)
class SerialPrediction(Result):
    """One step, op after op. Seconds of the machine that the profile was measured on."""

    workload: str
    batch_size: int
    profile: Profile
    iteration: float
    interval: tuple[float, float]
    by_family: Mapping[str, float]
    by_phase: Mapping[str, float]
    by_kind: Mapping[str, float]
    host: float
    ops: tuple[tuple[str, str, float], ...]
    estimated_ops: tuple[str, ...]
    estimated_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds and shares."""
        return {
            "workload": self.workload,
            "batch_size": self.batch_size,
            "device": dict(self.profile.identity),
            "clock": self.profile.clock,
            "iteration_ms": 1e3 * self.iteration,
            "interval_ms": [1e3 * bound for bound in self.interval],
            "host_ms": 1e3 * self.host,
            "by_family_ms": {name: 1e3 * seconds for name, seconds in self.by_family.items()},
            "by_phase_ms": {name: 1e3 * seconds for name, seconds in self.by_phase.items()},
            "estimated_ops": list(self.estimated_ops),
            "estimated_share": self.estimated_seconds / self.iteration if self.iteration else 0.0,
        }

    def headline(self) -> str:
        """The step and where its time goes."""
        low, high = self.interval
        lines = [
            f"{self.workload}, batch {self.batch_size}: {1e3 * self.iteration:.2f} ms a step on "
            f"{self.profile.identity.get('name')} (90 % interval {1e3 * low:.2f} to {1e3 * high:.2f} ms)"
        ]
        lines += [f"  {name:<20} {1e3 * seconds:9.3f} ms" for name, seconds in self.by_family.items()]
        if self.estimated_ops:
            share = self.estimated_seconds / self.iteration
            lines.append(f"{share:.1%} of it are ops that were not measured: {', '.join(self.estimated_ops[:6])}")
        return "\n".join(lines)

    def records(self) -> Records:
        """Table "ops": one row per op of the step, in order."""
        return {"ops": [{"op": name, "kind": kind, "ms": 1e3 * seconds} for name, kind, seconds in self.ops]}


def predict_serial(workload: Workload, profile: Profile, access: Sequence[str] = ()) -> SerialPrediction:
    """Predicts one step of one process. `access` says of every embedding table which rows its lookups want."""
    return _summed(workload, profile, priced_ops(workload.programs[0], profile, access))


def table_access(program: Program, access: Sequence[str]) -> dict[int, str]:
    """The access law of every op that works on a table, by op number: tables are told apart by the order of their
    lookups in the forward pass."""
    if not access:
        return {}
    by_storage: dict[int, str] = {}
    laws: dict[int, str] = {}
    remaining = list(access)
    for op in program.ops:
        kind = kind_of(op.signature)
        if kind in ("_embedding_bag", "embedding") and remaining and op.inputs[0].storage not in by_storage:
            law = remaining.pop(0)
            by_storage[op.inputs[0].storage] = by_storage[op.inputs[1].storage] = law
        if family_of(kind).startswith("embedding"):
            known = [by_storage[tensor.storage] for tensor in op.inputs if tensor.storage in by_storage]
            if known:
                laws[op.index] = known[0]
                for tensor in op.outputs:
                    by_storage.setdefault(tensor.storage, known[0])
    return laws


class PricedOp(NamedTuple):
    """One CPU op out of a captured one: seconds, the deviation of their logarithm, whether its kind was measured."""

    op: Op
    kind: str
    seconds: float
    sigma: float
    known: bool


def priced_ops(program: Program, profile: Profile, access: Sequence[str] = ()) -> list[PricedOp]:
    """Every op that a CPU runs in a step, where its operands lie; `access` as in `predict_serial`."""
    laws = table_access(program, access)
    rows = operands(program, 2 * profile.caches.l3, lambda op, signature: touched_bytes(signature, laws.get(op, "")))
    return [
        PricedOp(
            op, kind_of(signature), *_priced(profile, op.signature, signature, rows[op.index], laws.get(op.index, ""))
        )
        for op in program.ops
        for signature in cpu_ops(op.signature)
    ]


def host_seconds(program: Program, profile: Profile) -> float:
    """What the host of a step takes beside its kernels."""
    return float(host_events(program) @ np.array([profile.host.get(name, 0.0) for name in HOST_EVENTS]))


def deviation_seconds(priced: Sequence[PricedOp], host: float, profile: Profile) -> float:
    """The standard deviation of a step: ops of one kind err alike, kinds and the host apart."""
    total = host + sum(one.seconds for one in priced)
    errors = totals((one.kind, one.sigma * one.seconds) for one in priced)
    return math.hypot(*errors.values(), profile.host_spread * host, _STEP_SIGMA * total)


def _summed(workload: Workload, profile: Profile, priced: Sequence[PricedOp]) -> SerialPrediction:
    program = workload.programs[0]
    host = host_seconds(program, profile)
    families = totals([("host", host), *((family_of(kind), seconds) for _, kind, seconds, _, _ in priced)])
    total = sum(families.values())
    spread = deviation_seconds(priced, host, profile) / max(total, 1e-12)
    unknown = totals((op.name, seconds) for op, _, seconds, _, known in priced if not known)
    return SerialPrediction(
        workload=workload.name, batch_size=program.batch_size, profile=profile, iteration=total,
        interval=(total * math.exp(-Z90 * spread), total * math.exp(Z90 * spread)),
        by_family=families, by_phase=totals((op.phase.name.lower(), seconds) for op, _, seconds, _, _ in priced),
        by_kind=totals((kind, seconds) for _, kind, seconds, _, _ in priced), host=host,
        ops=tuple((op.name, kind, seconds) for op, kind, seconds, _, _ in priced),
        estimated_ops=tuple(unknown), estimated_seconds=sum(unknown.values()),
    )  # fmt: skip


def _priced(
    profile: Profile, whole: Signature, signature: Signature, found: Found, law: str
) -> tuple[float, float, bool]:
    """Seconds, deviation, and whether measured, of one CPU op out of a captured one."""
    if runs_no_kernel(signature):
        return 0.0, 0.0, True
    row, code = found
    if len(whole.inputs) != len(signature.inputs):
        farthest = max((operand.distance for operand in row), default=0)
        row = tuple(Operand(spec.nbytes, farthest) for spec in (*signature.inputs, *signature.outputs))
    seconds, sigma, known = profile.seconds(describe(signature, row, profile.caches, law, code=code, inside=True))
    return (1.0 + profile.longer) * seconds, sigma, known

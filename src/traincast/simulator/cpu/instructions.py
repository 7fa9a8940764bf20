"""A workload as instructions of CPU ranks: the host thread launches every kernel and waits for it.

Ranks meet on gloo's stream where they call a collective, which takes no time there; each pays for the collective on
its own core, where it waits for it (see `rank_plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from traincast.costs.cpu.features import get_family
from traincast.costs.cpu.host_events import sum_host_seconds_by_op
from traincast.costs.cpu.op_costs import PricedOp, price_ops
from traincast.costs.cpu.profile import Profile
from traincast.costs.kernels.call import Family, KernelCall
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.cost import Costs, Source
from traincast.costs.kernels.lowered import LoweredProgram
from traincast.costs.kernels.operands import get_compute_type
from traincast.costs.kernels.work import COUNTED_FLOPS
from traincast.ir.ops import Op
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.simulator.collective_calls import CollectiveCall, CollectiveCalls, read_collective
from traincast.simulator.cpu.instruction_rows import COMPUTING, InstructionRows
from traincast.simulator.cpu.rank_plan import Mark, RankPlan, find_communication_marks, make_rank_plan
from traincast.simulator.instructions import StepInstructions, join_instructions
from traincast.simulator.schedule import Code, Schedule
from traincast.utils.arrays import FloatArray


@dataclass(frozen=True, eq=False, slots=True)
class CpuProgram:
    """One program on a CPU: its priced ops, host seconds before each op, the instructions of a step with their host
    seconds, and its collectives; `paid[n]` is the call that stands for the time of collective n."""

    priced: list[PricedOp]
    host: FloatArray
    schedule: Schedule
    host_seconds: FloatArray
    collectives: CollectiveCalls
    paid: list[int]
    plan: RankPlan


@dataclass(frozen=True, eq=False, slots=True)
class CpuStep:
    """The programs of a step as instructions, and what their calls cost: collectives nothing until they are paid."""

    programs: tuple[CpuProgram, ...]
    instructions: StepInstructions
    costs: Costs

    def pay_collectives(self, seconds: FloatArray, sigma: FloatArray) -> None:
        """Gives every collective its seconds and the deviation of their logarithm, on each rank that takes part."""
        for collective, taken, spread in zip(self.instructions.meetings, seconds, sigma, strict=True):
            for part in collective.participants:
                call = self.programs[part.program].paid[part.call]
                self.costs.seconds[call], self.costs.sigma[call] = taken, spread


def lower_step(workload: Workload, profile: Profile, access: Sequence[Sequence[str]] = ()) -> CpuStep:
    """The step on the machine of a profile; `access[r]` says which rows the lookups of rank r touch (empty: any)."""
    programs, ranks = workload.programs, workload.ranks
    if access:  # ranks that run one program may touch other rows
        programs, ranks = tuple(programs[number] for number in ranks), tuple(range(len(ranks)))
    calls, lowered = _CallList(), []
    for number, program in enumerate(programs):
        cost = price_ops(program, profile, access[number] if access else (), ranks=len(ranks))
        lowered.append(_Writer(program, cost, sum_host_seconds_by_op(program, profile), calls).write())
    shared = calls.lowered()
    instructions = join_instructions(
        programs, ranks, (shared,) * len(programs), tuple(one.schedule for one in lowered),
        tuple(one.collectives for one in lowered),
    )  # fmt: skip
    return CpuStep(tuple(lowered), instructions, calls.costs())


@dataclass(slots=True)
class _CallList:
    """Calls of all programs so far. Each launch is a call of its own: what it takes depends on where its operands
    are."""

    calls: list[tuple[str, str, str, float]] = field(default_factory=list)  # family, kind, compute type, flops
    seconds: list[float] = field(default_factory=list)
    sigma: list[float] = field(default_factory=list)
    known: list[bool] = field(default_factory=list)

    def add(self, one: PricedOp) -> int:
        """The number of a new call."""
        specs = (*one.op.signature.outputs, *one.op.signature.inputs)
        compute = get_compute_type(specs[0]) if specs else "fp32"
        return self._add((get_family(one.kind), one.kind, compute, one.flops), one.seconds, one.sigma, known=one.known)

    def add_collective(self, exchange: CollectiveCall) -> int:
        """The number of a call of a collective, which costs nothing yet."""
        return self._add((COLLECTIVE.name, exchange.kind, exchange.compute, 0.0), 0.0, 0.0, known=True)

    def _add(self, call: tuple[str, str, str, float], seconds: float, sigma: float, *, known: bool) -> int:
        self.calls.append(call)
        self.seconds.append(seconds)
        self.sigma.append(sigma)
        self.known.append(known)
        return len(self.calls) - 1

    def lowered(self) -> LoweredProgram:
        """All calls, as every program refers to them."""
        kinds: dict[str, dict[str, None]] = {}
        for family, kind, _, _ in self.calls:
            kinds.setdefault(family, {})[kind] = None
        families = {name: Family(name, tuple(some), (COUNTED_FLOPS,)) for name, some in kinds.items()}
        calls = tuple(
            KernelCall(families[family], kind, compute, (flops,), estimated=not known)
            for (family, kind, compute, flops), known in zip(self.calls, self.known, strict=True)
        )
        return LoweredProgram(calls, (), (), ~np.array(self.known, dtype=np.bool_), (), ())

    def costs(self) -> Costs:
        """What the calls cost."""
        known = np.array(self.known, dtype=np.bool_)
        return Costs(
            seconds=np.array(self.seconds), sigma=np.array(self.sigma), in_domain=known,
            source=np.where(known, Source.MODEL, Source.ESTIMATED), factor=np.ones(len(known)),
            new_gpu=np.zeros(len(known), dtype=np.bool_),
        )  # fmt: skip


class _Writer:
    """Writes the instructions of one program."""

    def __init__(self, program: Program, cost: list[PricedOp], host: FloatArray, calls: _CallList) -> None:
        self.program, self.priced, self.host, self.calls = program, cost, host, calls
        self.rows = InstructionRows()
        self.exchanges: list[CollectiveCall] = []
        self.paid: list[int] = []
        self.callers: list[Op] = []  # the op of each collective
        self.unpaid = 0  # the first collective that was not waited for

    def write(self) -> CpuProgram:
        """Op by op: host work, kernels, and where the rank calls collectives or waits for them."""
        by_op: dict[int, list[PricedOp]] = {}
        for one in self.priced:
            by_op.setdefault(one.op.index, []).append(one)
        marks: dict[int, list[Mark]] = {}
        for mark in find_communication_marks(self.program):
            marks.setdefault(mark.op, []).append(mark)
        for op in self.program.ops:
            self._host(op)
            self._kernels(op, [self.calls.add(one) for one in by_op.get(op.index, ()) if one.seconds > 0.0])
            for mark in marks.get(op.index, ()):
                self._wait(op, mark.number) if mark.waits else self._call(op)
        if self.program.num_ops:
            self._pay(self.program.ops[-1], len(self.paid))
        instruction = np.array(self.rows.collectives, dtype=np.int64)
        kernels = np.bincount(
            [one.op.index for one in self.priced], weights=[one.seconds for one in self.priced],
            minlength=self.program.num_ops,
        )  # fmt: skip
        return CpuProgram(
            priced=self.priced, host=self.host, schedule=self.rows.schedule(), host_seconds=self.rows.host_seconds,
            collectives=CollectiveCalls(instruction, tuple(self.exchanges)), paid=self.paid,
            plan=make_rank_plan(self.program, self.host + kernels),
        )  # fmt: skip

    def _host(self, op: Op) -> None:
        seconds, name = float(self.host[op.index]), int(self.program.columns.scope_name[op.scope])
        if seconds > 0.0:
            self.rows.add(Code.HOST, name=name, scope=op.scope, seconds=seconds)

    def _kernels(self, op: Op, calls: Sequence[int]) -> None:
        """Kernels of an op one after the other; the host waits for the last."""
        for call in calls:
            self.rows.add(Code.LAUNCH, target=COMPUTING, call=call, op=op.index, scope=op.scope)
        if calls:
            self.rows.add(Code.STREAM_SYNCHRONIZE, target=COMPUTING, op=op.index, scope=op.scope)

    def _call(self, op: Op) -> None:
        exchange = read_collective(
            op.signature, get_compute_type(op.signature.inputs[0]) if op.signature.inputs else "fp32"
        )
        self.rows.call(len(self.paid), call=self.calls.add_collective(exchange), op=op.index, scope=op.scope)
        self.exchanges.append(exchange)
        self.callers.append(op)
        self.paid.append(self.calls.add_collective(exchange))

    def _wait(self, op: Op, number: int) -> None:
        self.rows.add(Code.EVENT_SYNCHRONIZE, target=number, op=op.index, scope=op.scope)
        self._pay(op, number + 1)

    def _pay(self, at: Op, until: int) -> None:
        """The core's time for collectives that are not paid for yet: gloo takes them in their order."""
        for number in range(self.unpaid, until):
            op = self.callers[number].index
            self.rows.add(Code.LAUNCH, target=COMPUTING, call=self.paid[number], op=op, scope=at.scope)
        if until > self.unpaid:
            self.rows.add(Code.STREAM_SYNCHRONIZE, target=COMPUTING, op=at.index, scope=at.scope)
        self.unpaid = max(self.unpaid, until)

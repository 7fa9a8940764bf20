"""A workload as instructions of CPU ranks, whose host threads launch every kernel and wait for it, and when ranks meet.

Every rank computes on one core, and gloo's thread takes the same core: a collective begins when the last rank has
called it, and its time is lost to every rank, whether it waits or computes. (An all-reduce behind which a core computed
made it 0.9 to 1.4 times as much longer as the all-reduce takes by itself, for 64 KB to 8 MB.) So a rank pays for a
collective where it waits for it.

Ranks meet on gloo's stream where they call a collective, which takes no time there; each pays for the collective on its
own core, where it waits for it (see `rank_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from traincast.costs.cpu.collectives import CpuCollective
from traincast.costs.cpu.features import get_family
from traincast.costs.cpu.op_costs import PricedOp, price_ops, sum_host_seconds_by_op
from traincast.costs.cpu.profile import Profile
from traincast.costs.host.profile import ALONE
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import Family, KernelCall
from traincast.costs.kernels.cost import COUNTED_FLOPS, Costs, Source
from traincast.costs.kernels.lower import LoweredProgram
from traincast.costs.kernels.registry import get_compute_type
from traincast.ir.collectives import COLLECTIVE_OPS
from traincast.ir.ops import Op
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.simulator.collective_calls import CollectiveCall, CollectiveCalls, read_collective
from traincast.simulator.instructions import StepInstructions, join_instructions
from traincast.simulator.many_ranks import Collectives, RankGroup, simulate_ranks
from traincast.simulator.schedule import Code, Schedule, count_resources
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError

COMPUTING, GLOO = 0, 1
"""Streams: the core that computes (the one that captures call 0), and gloo, where ranks meet."""


@dataclass(slots=True)
class InstructionRows:
    """Rows of a schedule so far, with the host seconds of each. `collectives` are the instructions at which the rank
    joins its collectives, in order; `computes` those that `compute` wrote."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    computes: list[int] = field(default_factory=list)

    def add(
        self, code: Code, *, target: int = -1, event: int = -1, name: int = -1, call: int = -1, op: int = -1,
        scope: int = 0, seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """One instruction; `seconds` are what the host thread takes for it."""
        part = ALONE if code is Code.HOST else -1
        self.rows.append((code, 0, target, event, name, part, -1, call, op, scope))
        self.seconds.append(seconds)

    def compute(self, seconds: float) -> None:
        """Host work of this many seconds."""
        self.computes.append(len(self.rows))
        self.add(Code.HOST, seconds=seconds)

    def call(self, number: int, *, call: int = -1, op: int = -1, scope: int = 0) -> None:
        """The rank joins its collective `number` and goes on; event `number` is when all ranks have."""
        self.collectives.append(len(self.rows))
        self.add(Code.LAUNCH, target=GLOO, call=call, op=op, scope=scope)
        self.add(Code.EVENT_RECORD, target=GLOO, event=number, op=op, scope=scope)

    @property
    def host_seconds(self) -> FloatArray:
        """Host seconds of every instruction."""
        return np.array(self.seconds)

    def schedule(self) -> Schedule:
        """The instructions as columns."""
        return count_resources(np.array(self.rows, dtype=np.int32).reshape(-1, 10).T.copy())


_RECORD, _WAIT = "cuda::event_record", "cuda::stream_wait_event"
_DRAWS = 48  # steps, and as many that deviate the other way


class Mark(NamedTuple):
    """At op `op` a rank calls collective number `number`, or waits for it."""

    op: int
    number: int
    waits: bool


def find_communication_marks(program: Program) -> Iterator[Mark]:
    """Where a captured rank calls collectives (of two ranks or more) and waits for them, in order."""
    finished_by: dict[object, int] = {}  # event -> the collective after which it was recorded
    last_on: dict[object, int] = {}  # stream -> its last collective
    number = 0
    for op in program.ops:
        event, stream = op.signature.scalar("event"), op.signature.scalar("stream")
        if op.name in COLLECTIVE_OPS and not _is_alone(op.signature.scalar("group")):
            last_on[op.stream] = number
            yield Mark(op.index, number, waits=False)
            number += 1
        elif op.name == _RECORD and stream in last_on and stream != COMPUTING:
            finished_by[event] = last_on[stream]
        elif op.name == _WAIT and stream == COMPUTING and event in finished_by:
            yield Mark(op.index, finished_by[event], waits=True)


def _is_alone(group: object) -> bool:
    return isinstance(group, tuple) and len(group) < 2


@dataclass(frozen=True, slots=True)
class Stretch:
    """A rank computes for `seconds`, then calls collective number `calls` or waits for number `awaits` (-1: no)."""

    seconds: float
    calls: int = -1
    awaits: int = -1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does, and its collectives in the order of their calls."""

    stretches: tuple[Stretch, ...]
    exchanges: tuple[CpuCollective, ...]


def make_rank_plan(program: Program, op_seconds: FloatArray) -> RankPlan:
    """A captured rank as stretches of computing between calls and waits; `op_seconds` has the seconds of every op."""
    computed = np.concatenate(([0.0], np.cumsum(op_seconds)))
    stretches: list[Stretch] = []
    exchanges: list[CpuCollective] = []
    since = 0.0
    for mark in find_communication_marks(program):
        until = float(computed[mark.op + 1])
        if mark.waits:
            stretches.append(Stretch(until - since, awaits=mark.number))
        else:
            stretches.append(Stretch(until - since, calls=mark.number))
            exchanges.append(_read_collective(program.ops[mark.op].signature.scalars))
        since = until
    return RankPlan((*stretches, Stretch(float(computed[-1]) - since)), tuple(exchanges))


def _read_collective(scalars: Sequence[tuple[str, object]]) -> CpuCollective:
    values = dict(scalars)
    size, sent = values["bytes"], values.get("send_splits")
    assert isinstance(size, int)
    return CpuCollective(
        str(values["collective"]), size, tuple(int(part) for part in sent) if isinstance(sent, tuple) else ()
    )


def compute_step_seconds(
    plans: Sequence[RankPlan], cost: Callable[[Sequence[CpuCollective]], float], jitter: float = 0.0
) -> float:
    """Seconds until the last rank is done; `cost` prices a collective from what its ranks call. With `jitter`, the
    relative deviation of what a rank computes from step to step, the mean over such steps: whoever is late at a
    collective keeps the others waiting, so that ranks which are equally fast on average still lose time to each
    other."""
    if len({tuple(exchange.kind for exchange in plan.exchanges) for plan in plans}) > 1:
        raise TraincastError("ranks disagree on the order of their collectives; they would wait for ever")
    costs = [cost([plan.exchanges[number] for plan in plans]) for number in range(len(plans[0].exchanges))]
    computing = [np.array([[one.seconds for one in plan.stretches]]) for plan in plans]
    if jitter > 0.0:
        random = np.random.default_rng(0)
        draws = [[random.standard_normal(len(plan.stretches)) for plan in plans] for _ in range(_DRAWS)]
        computing = [
            np.stack(
                [_draw_stretches(seconds[0], sign * jitter * draw[rank]) for draw in draws for sign in (1.0, -1.0)]
            )
            for rank, seconds in enumerate(computing)
        ]
    return float(np.mean(_simulate(plans, computing, costs)))


def _draw_stretches(seconds: FloatArray, deviations: FloatArray) -> FloatArray:
    """The stretches of a rank in one step; deviations in units of what all of them take. Disturbances fall anywhere, so
    that the variance of a stretch goes with its length, and that of all together is the step's."""
    return np.asarray(np.maximum(seconds + deviations * np.sqrt(seconds.sum() * seconds), 0.0))


def _simulate(plans: Sequence[RankPlan], computing: Sequence[FloatArray], costs: Sequence[float]) -> FloatArray:
    """When the last rank of each drawn step is done: `computing[rank]` is float64[steps, stretches]. All steps are
    simulated side by side; ranks of one step meet, those of others do not."""
    groups, entries = [], []
    steps, collectives = len(computing[0]), len(costs)
    for rank, (plan, seconds) in enumerate(zip(plans, computing, strict=True)):
        rows = _make_plan_rows(plan, costs)
        host = np.tile(rows.host_seconds, (steps, 1))
        host[:, rows.computes] = seconds
        groups.append(RankGroup(rows.schedule(), host, np.zeros_like(host)))
        entries += [
            (step * collectives + number, rank, step, instruction)
            for step in range(steps)
            for number, instruction in enumerate(rows.collectives)
        ]
    collective, group, row, instruction = np.array(entries, dtype=np.int64).reshape(-1, 4).T
    matched = Collectives(collective, group, row, instruction, np.zeros(steps * collectives))
    return np.asarray(np.max([simulation.latest() for simulation in simulate_ranks(groups, matched)], axis=0))


def _make_plan_rows(plan: RankPlan, costs: Sequence[float]) -> InstructionRows:
    """The instructions of a plan; a stretch is host work, and so is the time of a collective."""
    rows, called, paid = InstructionRows(), 0, 0
    for stretch in plan.stretches:
        rows.compute(stretch.seconds)
        if stretch.calls >= 0:
            rows.call(called)
            called += 1
        elif stretch.awaits >= called:
            raise TraincastError("ranks wait for each other for ever (they wait for a collective before they call it)")
        elif stretch.awaits >= 0:
            rows.add(Code.EVENT_SYNCHRONIZE, target=stretch.awaits)
            rows.add(Code.HOST, seconds=sum(costs[paid : stretch.awaits + 1]))  # gloo takes them in their order
            paid = max(paid, stretch.awaits + 1)
    rows.add(Code.HOST, seconds=sum(costs[paid:]))
    return rows


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
        for collective, taken, spread in zip(self.instructions.collectives, seconds, sigma, strict=True):
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

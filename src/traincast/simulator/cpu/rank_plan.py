"""The ranks of a measured machine between their collectives: when the last one is done, and what jitter adds.

Every rank computes on one core, and gloo's thread takes the same core: a collective begins when the last rank has
called it, and its time is lost to every rank, whether it waits or computes. (An all-reduce behind which a core computed
made it 0.9 to 1.4 times as much longer as the all-reduce takes by itself, for 64 KB to 8 MB.) So a rank pays for a
collective where it waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from traincast.costs.cpu.collectives import CpuCollective
from traincast.ir.collectives import COLLECTIVE_OPS
from traincast.ir.program import Program
from traincast.simulator.cpu.instruction_rows import COMPUTING, InstructionRows
from traincast.simulator.many_ranks import Collectives, RankGroup, simulate_ranks
from traincast.simulator.schedule import Code
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError

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
    meetings = Collectives(collective, group, row, instruction, np.zeros(steps * collectives))
    return np.asarray(np.max([simulation.latest() for simulation in simulate_ranks(groups, meetings)], axis=0))


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

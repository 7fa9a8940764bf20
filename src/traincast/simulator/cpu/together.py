"""One step of several CPU ranks: every rank computes on one core, and what it exchanges takes time of the same core.

A collective begins when the last rank has called it and lasts as long as measured. A rank that computes meanwhile
gains nothing: gloo's thread wants the same core. (An all-reduce behind which a core computed made it 0.9 to 1.4 times
as much longer as the all-reduce takes by itself, for 64 KB to 8 MB.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from traincast.costs.cpu.exchanges import Exchange
from traincast.ir.collectives import COLLECTIVE_OPS
from traincast.ir.program import Program
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError

_RECORD, _WAIT = "cuda::event_record", "cuda::stream_wait_event"
_COMPUTES = 0  # the stream that a rank's own ops are captured on
_ROUNDING = 1e-12  # seconds
_DRAWS = 48  # steps, and as many that deviate the other way


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
    exchanges: tuple[Exchange, ...]


def rank_plan(program: Program, op_seconds: FloatArray) -> RankPlan:
    """A captured rank as stretches of computing between calls and waits; `op_seconds` has the time of every op."""
    stretches: list[Stretch] = []
    exchanges: list[Exchange] = []
    finished_by: dict[int, int] = {}  # event -> the collective after which it was recorded
    last_on: dict[int, int] = {}  # stream -> its last collective
    computing = 0.0
    for op in program.ops:
        computing += float(op_seconds[op.index])
        event, stream = op.signature.scalar("event"), op.signature.scalar("stream")
        if op.name in COLLECTIVE_OPS:
            stretches.append(Stretch(computing, calls=len(exchanges)))
            last_on[op.stream] = len(exchanges)
            exchanges.append(_exchange(op.signature.scalars))
        elif op.name == _RECORD and stream in last_on and stream != _COMPUTES:
            finished_by[_whole(event)] = last_on[_whole(stream)]
            continue
        elif op.name == _WAIT and stream == _COMPUTES and _whole(event) in finished_by:
            stretches.append(Stretch(computing, awaits=finished_by[_whole(event)]))
        else:
            continue
        computing = 0.0
    return RankPlan((*stretches, Stretch(computing)), tuple(exchanges))


def _exchange(scalars: Sequence[tuple[str, object]]) -> Exchange:
    values = dict(scalars)
    sent = values.get("send_splits")
    return Exchange(
        str(values["collective"]), _whole(values["bytes"]), tuple(map(_whole, sent)) if isinstance(sent, tuple) else ()
    )


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


class _Rank:
    """Where one rank stands: the stretch it is in, and what is left of it."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan, self.position = plan, 0
        self.left = plan.stretches[0].seconds

    @property
    def stretch(self) -> Stretch:
        return self.plan.stretches[self.position]

    @property
    def done(self) -> bool:
        return self.position == len(self.plan.stretches) - 1 and self.left <= 0.0

    def advance(self) -> None:
        """Into the next stretch."""
        self.position += 1
        self.left = self.stretch.seconds


def step_seconds(plans: Sequence[RankPlan], cost: Callable[[Sequence[Exchange]], float], jitter: float = 0.0) -> float:
    """Seconds until the last rank is done; `cost` prices a collective from what its ranks call. With `jitter`, the
    relative deviation of what a rank computes from step to step, the mean over such steps: whoever is late at a
    collective keeps the others waiting, so that ranks which are equally fast on average still lose time to each
    other."""
    kinds = {tuple(exchange.kind for exchange in plan.exchanges) for plan in plans}
    if len(kinds) > 1:
        raise TraincastError("ranks disagree on the order of their collectives; they would wait for ever")
    costs = [cost([plan.exchanges[number] for plan in plans]) for number in range(len(plans[0].exchanges))]
    if jitter <= 0.0:
        return _Together(plans, costs).run()
    random = np.random.default_rng(0)
    draws = [[random.standard_normal(len(plan.stretches)) for plan in plans] for _ in range(_DRAWS)]
    steps = [
        _Together([_varied(plan, sign * jitter * normal) for plan, normal in zip(plans, draw, strict=True)], costs)
        for draw in draws
        for sign in (1.0, -1.0)
    ]
    return float(np.mean([step.run() for step in steps]))


def _varied(plan: RankPlan, deviations: FloatArray) -> RankPlan:
    """A rank in one step; deviations in units of what all its stretches take. Disturbances fall anywhere, so that the
    variance of a stretch goes with its length, and that of all together is the step's."""
    seconds = np.array([stretch.seconds for stretch in plan.stretches])
    varied = np.maximum(seconds + deviations * np.sqrt(seconds.sum() * seconds), 0.0)
    return replace(
        plan, stretches=tuple(replace(one, seconds=float(t)) for one, t in zip(plan.stretches, varied, strict=True))
    )


class _Together:
    """All ranks and the collectives under way, moved from event to event."""

    def __init__(self, plans: Sequence[RankPlan], costs: Sequence[float]) -> None:
        self.ranks, self.costs = [_Rank(plan) for plan in plans], costs
        self.called = [0] * len(costs)
        self.ends = [inf] * len(costs)
        self.now = 0.0

    def run(self) -> float:
        while True:
            self._turn_corners()
            if all(rank.done for rank in self.ranks):
                return self.now
            self._move()

    def _turn_corners(self) -> None:
        """Ranks that have computed a stretch call or wait; one that waits goes on when its collective has ended."""
        for rank in (*self.ranks, *self.ranks):  # twice: what the last rank calls may end at once
            while not rank.done and rank.left <= 0.0:
                stretch = rank.stretch
                if stretch.calls >= 0:
                    self._call(stretch.calls)
                elif stretch.awaits >= 0 and self.ends[stretch.awaits] > self.now:
                    break
                rank.advance()

    def _call(self, number: int) -> None:
        self.called[number] += 1
        if self.called[number] == len(self.ranks):
            under_way = max((end for end in self.ends[:number] if self.now < end < inf), default=self.now)
            self.ends[number] = under_way + self.costs[number]  # gloo takes them in their order

    def _move(self) -> None:
        """To the next moment at which anything changes."""
        under_way = [end for end in self.ends if self.now < end < inf]
        moments = under_way or [self.now + rank.left for rank in self.ranks if rank.left > 0.0]
        if not moments:
            raise TraincastError("ranks wait for each other for ever (they disagree on their collectives)")
        then = min(moments)
        for rank in self.ranks:
            if rank.left > 0.0 and not under_way:
                left = rank.left - (then - self.now)
                rank.left = left if left > _ROUNDING else 0.0
        self.now = then

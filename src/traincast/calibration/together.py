"""One step of several CPU ranks: every rank computes on one core, and what it exchanges takes time of the same core.

A collective begins when the last rank has called it and lasts as long as measured. While it runs, gloo's own thread
takes its share of each rank's core, and a rank that computes meanwhile goes on that much slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from traincast.arrays import FloatArray
from traincast.calibration.exchanges import Cost, Exchange
from traincast.errors import TraincastError
from traincast.workload.collectives import COLLECTIVE_OPS
from traincast.workload.program import Program

_RECORD, _WAIT = "cuda::event_record", "cuda::stream_wait_event"
_COMPUTES = 0  # the stream that a rank's own ops are captured on
_MOST_TAKEN = 0.95  # of a core: the scheduler lets no thread starve
_ROUNDING = 1e-12  # seconds


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


def step_seconds(plans: Sequence[RankPlan], cost: Callable[[Sequence[Exchange]], Cost]) -> float:
    """Seconds until the last rank is done; `cost` prices a collective from what its ranks call."""
    kinds = {tuple(exchange.kind for exchange in plan.exchanges) for plan in plans}
    if len(kinds) > 1:
        raise TraincastError("ranks disagree on the order of their collectives; they would wait for ever")
    costs = [cost([plan.exchanges[number] for plan in plans]) for number in range(len(plans[0].exchanges))]
    return _Together(plans, costs).run()


class _Together:
    """All ranks and the collectives under way, moved from event to event."""

    def __init__(self, plans: Sequence[RankPlan], costs: Sequence[Cost]) -> None:
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
        for rank in self.ranks:
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
            self.ends[number] = under_way + self.costs[number].seconds  # gloo takes them in their order

    def _move(self) -> None:
        """To the next moment at which anything changes."""
        share = self._taken()
        speed = 1.0 - share
        moments = [self.now + rank.left / speed for rank in self.ranks if rank.left > 0.0]
        moments += [end for end in self.ends if self.now < end < inf]
        if not moments:
            raise TraincastError("ranks wait for each other for ever (they disagree on their collectives)")
        then = min(moments)
        for rank in self.ranks:
            if rank.left > 0.0:
                left = rank.left - speed * (then - self.now)
                rank.left = left if left > _ROUNDING else 0.0
        self.now = then

    def _taken(self) -> float:
        """The share of each core that the collectives under way take; a rank always gets some of its own."""
        shares = [
            cost.busy / cost.seconds
            for cost, end in zip(self.costs, self.ends, strict=True)
            if end < inf and end - cost.seconds <= self.now < end
        ]
        return min(sum(shares), _MOST_TAKEN)

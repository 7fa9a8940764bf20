"""All ranks of a traced run predicted together: predicted kernels, collectives and overheads, waits as they then arise.

The moments at which the ranks began are kept as measured: nothing in a trace predicts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.arrays import FloatArray
from traincast.collectives.calls import even_bytes
from traincast.collectives.model import shipped_collectives
from traincast.kernels.call import Calls, KernelCall
from traincast.kernels.collective import COLLECTIVE
from traincast.platform.topology import Topology
from traincast.replay.attribution import Attribution
from traincast.replay.timeline import Replay, compare
from traincast.replay.together import RankReplay, RanksReplay, RanksSchedule, exposed, walk_together
from traincast.traces.link import Linked
from traincast.traces.matched_collectives import Match
from traincast.workload.collectives import COLLECTIVES, UNEVEN_FORM


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """One step of one rank, in seconds: measured, replayed with all ranks, and as more and more of it is predicted.

    `full - measured` is the sum of the differences. Exposed communication is measured and fully predicted.
    """

    number: int
    measured: float
    replayed: float
    with_kernels: float
    with_collectives: float
    full: float
    exposed_measured: float
    exposed: float

    @property
    def error(self) -> float:
        """Signed relative error of the full prediction."""
        return self.full / self.measured - 1.0 if self.measured else 0.0

    def share(self, name: str) -> float:
        """What "walk", "kernels", "collectives" or "overheads" adds to the relative error."""
        stages = (self.measured, self.replayed, self.with_kernels, self.with_collectives, self.full)
        place = ("walk", "kernels", "collectives", "overheads").index(name)
        return (stages[place + 1] - stages[place]) / self.measured if self.measured else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class RanksPrediction:
    """All ranks predicted together. `transfers` are (kind, bytes, measured, predicted seconds) by collective."""

    topology: str
    steps: tuple[tuple[RankShares, ...], ...]
    transfers: tuple[tuple[str, int, float, float], ...]
    full: tuple[Replay, ...]


def predict_ranks(
    ranks: Sequence[Linked],
    attributions: Sequence[Attribution],
    replayed: RanksReplay,
    topology: Topology,
) -> RanksPrediction:
    """Walks all ranks with predicted kernels, then predicted transfers, then pooled overheads too."""
    base = replayed.walked.schedule
    measured, seconds = base.seconds, _transfers(replayed.matches.collectives, topology)
    kernels = tuple(found.predicted for found in attributions)
    stages = (
        replace(base, instructions=kernels),
        replace(base, instructions=kernels, seconds=seconds),
        replace(base, instructions=tuple(found.complete for found in attributions), seconds=seconds),
    )
    walks = [_compared(ranks, stage) for stage in stages]
    return RanksPrediction(
        topology=topology.key,
        steps=tuple(_shares(rank, [walk[i] for walk in walks]) for i, rank in enumerate(replayed.ranks)),
        transfers=tuple(
            (match.kind, message_bytes(match, _ranks(match)), float(m), float(p))
            for match, m, p in zip(replayed.matches.collectives, measured, seconds, strict=True)
        ),
        full=tuple(replay for replay, _ in walks[-1]),
    )


def _compared(ranks: Sequence[Linked], schedule: RanksSchedule) -> list[tuple[Replay, list[float]]]:
    """Every rank's steps, and its exposed communication by step."""
    walked = walk_together(schedule)
    rows = zip(ranks, schedule.instructions, walked.times, schedule.begin.tolist(), strict=True)
    return [
        (compare(linked, instructions, times, begin), exposed(linked, instructions, times))
        for linked, instructions, times, begin in rows
    ]


def _shares(rank: RankReplay, walks: Sequence[tuple[Replay, list[float]]]) -> tuple[RankShares, ...]:
    (kernels, _), (collectives, _), (full, communication) = walks
    return tuple(
        RankShares(
            number=step.number, measured=step.measured, replayed=step.walked, with_kernels=a.walked,
            with_collectives=b.walked, full=c.walked, exposed_measured=measured, exposed=predicted,
        )
        for step, a, b, c, (measured, _), predicted in zip(
            rank.replay.steps, kernels.steps, collectives.steps, full.steps, rank.exposed, communication, strict=True
        )
    )  # fmt: skip


def _transfers(matches: Sequence[Match], topology: Topology) -> FloatArray:
    """Predicted seconds of every collective from its last arrival; as measured where the trace has no size."""
    seconds = np.array([match.seconds for match in matches])
    known = [i for i, match in enumerate(matches) if message_bytes(match, _ranks(match)) >= 0]
    calls = [_call(matches[i], topology) for i in known]
    if calls:
        seconds[known] = shipped_collectives().predict(Calls.of(COLLECTIVE, calls), topology).seconds
    return seconds


def _ranks(match: Match) -> int:
    return max(match.calls[0].group_size, len(match.members))


def _call(match: Match, topology: Topology) -> KernelCall:
    ranks = _ranks(match)
    group = match.calls[0].group_ranks
    nodes = len({rank // topology.gpus_per_node for rank in group}) if group else topology.nodes_for(ranks)
    return COLLECTIVE.call(match.kind, "fp32", bytes=message_bytes(match, ranks), ranks=ranks, nodes=nodes)


def message_bytes(match: Match, ranks: int) -> int:
    """nccl-tests' size of a collective of so many ranks: the larger buffer of one, -1 where the trace does not say."""
    sent = max(call.message_bytes for call in match.calls)
    received = max(call.output_bytes for call in match.calls)
    if match.kind in COLLECTIVES and COLLECTIVES[match.kind].gathers:
        return received if received >= 0 else sent * ranks if sent >= 0 else -1
    splits = [call.in_splits for call in match.calls]
    if match.kind in UNEVEN_FORM and all(len(sizes) == len(match.members) and sum(sizes) for sizes in splits):
        items = [[call.message_bytes * n / sum(call.in_splits) for n in call.in_splits] for call in match.calls]
        return round(even_bytes(items))
    return sent

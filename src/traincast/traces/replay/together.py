"""All ranks of a traced run replayed, and predicted, together: a collective ends when the last rank has come and
the transfer is done.

A replay of one rank takes its collectives' durations as measured, waiting for other ranks included. Here only the
transfer is measured, which is what the rank that came last needed; who waits for whom and for how long is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traincast.costs.collectives.links import share_bytes_evenly
from traincast.costs.collectives.model import load_shipped_collectives
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import Calls, KernelCall
from traincast.hardware.topology import Topology
from traincast.ir.collectives import COLLECTIVES, UNEVEN_FORM
from traincast.simulator.many_ranks import (
    Clocks,
    Collectives,
    Deadlock,
    GroupSimulation,
    RankGroup,
    RankTimes,
    simulate_ranks,
)
from traincast.simulator.schedule import Code
from traincast.traces.breakdown import StepBreakdown
from traincast.traces.collectives import Match, Matches
from traincast.traces.link import Linked
from traincast.traces.replay.attribution import Attribution, StepShares, compute_gmae
from traincast.traces.replay.steps import Replay, compare_with_measured, compute_exposed_communication
from traincast.traces.replay.timeline import TimelineInstructions
from traincast.utils.arrays import FloatArray, IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class RanksSchedule:
    """The instructions of all ranks, when each rank begins (seconds on a common clock), and where they meet: every rank
    is a rank group of its own."""

    timelines: tuple[TimelineInstructions, ...]
    begin: FloatArray
    collectives: Collectives

    def replace_seconds(self, seconds: FloatArray) -> RanksSchedule:
        """The same with other lengths of the collectives' transfers, in seconds."""
        return replace(self, collectives=replace(self.collectives, seconds=seconds))


@dataclass(frozen=True, eq=False, kw_only=True)
class RanksSimulation:
    """What the simulation made of all ranks: one rank group per rank, on the common clock."""

    schedule: RanksSchedule
    simulations: tuple[GroupSimulation, ...]

    @property
    def times(self) -> list[RankTimes]:
        """When every instruction of each rank was done."""
        return [simulation.times(0) for simulation in self.simulations]

    @property
    def seconds(self) -> float:
        """Seconds from the begin of the first rank to the end of the last."""
        return max(float(simulation.latest().max()) for simulation in self.simulations) - float(
            self.schedule.begin.min()
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class RankReplay:
    """One rank of a replay of all. `exposed` is exposed communication per step, measured and simulated; `waited` the
    time that its collectives waited for other ranks in all steps, in seconds; `last` how often it came last."""

    replay: Replay
    exposed: tuple[tuple[float, float], ...]
    waited: float
    last: int


@dataclass(frozen=True, eq=False, kw_only=True)
class RanksReplay:
    """All ranks replayed together."""

    matches: Matches
    simulation: RanksSimulation
    ranks: tuple[RankReplay, ...]

    @property
    def slowest(self) -> tuple[float, float]:
        """Measured and simulated seconds of the slowest rank: the longest of the ranks' median steps."""
        steps = [[(s.measured, s.simulated) for s in rank.replay.steps] for rank in self.ranks]
        measured, simulated = (max(float(np.median([s[i] for s in rank])) for rank in steps) for i in (0, 1))
        return measured, simulated


def schedule_ranks(
    ranks: Sequence[Linked], timelines: Sequence[TimelineInstructions], matches: Matches
) -> RanksSchedule:
    """Puts the instructions of all ranks on one clock and finds their collectives among them."""
    first = min(timeline.origin for timeline in timelines)
    begin = np.array([float(timeline.origin - first) for timeline in timelines]) - matches.offset
    places = _find_launches(ranks, timelines)
    entries = [
        (number, member, int(places[member][call.row]))
        for number, match in enumerate(matches.collectives)
        for member, call in zip(match.members, match.calls, strict=True)
    ]
    collective, rank, instruction = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    # what kept a kernel that was ready from starting is part of its length: that of the last rank counts too
    seconds = np.full(len(matches.collectives), np.inf)
    lengths = [timelines[r].device_seconds[i] for r, i in zip(rank.tolist(), instruction.tolist(), strict=True)]
    np.minimum.at(seconds, collective, lengths)
    return RanksSchedule(
        timelines=tuple(timelines),
        begin=1e-9 * (begin - begin.min()),
        collectives=Collectives(collective, rank, np.zeros_like(rank), instruction, seconds),
    )


def _find_launches(ranks: Sequence[Linked], timelines: Sequence[TimelineInstructions]) -> list[IntArray]:
    """For every rank the instruction that launches each event; -1 for none."""
    places = []
    for linked, timeline in zip(ranks, timelines, strict=True):
        place = np.full(len(linked.events), -1, dtype=np.int64)
        launches = np.flatnonzero((timeline.schedule.code == Code.LAUNCH) & (timeline.point >= 0))
        place[timeline.row[launches]] = launches
        places.append(place)
    return places


def _filter_launched(ranks: Sequence[Linked], timelines: Sequence[TimelineInstructions], matches: Matches) -> Matches:
    """The collectives that every member launched by a call that the simulation knows; others stay as measured."""
    places = _find_launches(ranks, timelines)
    kept = tuple(
        match
        for match in matches.collectives
        if all(places[member][call.row] >= 0 for member, call in zip(match.members, match.calls, strict=True))
    )
    return replace(matches, collectives=kept)


def simulate_together(schedule: RanksSchedule) -> RanksSimulation:
    """Simulates all ranks; raises `Deadlock` if the collectives cannot be as they were matched."""
    groups = [RankGroup(t.schedule, t.host_seconds[None], t.device_seconds[None]) for t in schedule.timelines]
    gap = min(timeline.gap for timeline in schedule.timelines)  # ranks of a run hardly differ
    clocks = [
        [Clocks([begin] * s.num_threads, [begin - gap] * s.num_streams, [begin] * s.num_events)]
        for s, begin in zip((group.schedule for group in groups), schedule.begin.tolist(), strict=True)
    ]
    return RanksSimulation(
        schedule=schedule, simulations=tuple(simulate_ranks(groups, schedule.collectives, clocks=clocks, gap=gap))
    )


def compare_ranks(ranks: Sequence[Linked], simulated: RanksSimulation) -> list[tuple[Replay, list[float]]]:
    """Every rank's steps against the measured ones, and its exposed communication by step in seconds."""
    schedule = simulated.schedule
    rows = zip(ranks, schedule.timelines, simulated.times, schedule.begin.tolist(), strict=True)
    return [
        (compare_with_measured(linked, timeline, times, begin), compute_exposed_communication(linked, timeline, times))
        for linked, timeline, times, begin in rows
    ]


def replay_ranks(
    ranks: Sequence[Linked],
    timelines: Sequence[TimelineInstructions],
    matches: Matches,
    steps: Sequence[Sequence[StepBreakdown]],
) -> RanksReplay | None:
    """Replays all ranks together, or gives None where no collective could be matched or they contradict each other."""
    matches = _filter_launched(ranks, timelines, matches)
    if not matches.collectives:
        return None
    try:
        simulated = simulate_together(schedule_ranks(ranks, timelines, matches))
    except Deadlock:
        return None
    waited, last = _compute_waits(simulated)
    return RanksReplay(
        matches=matches,
        simulation=simulated,
        ranks=tuple(
            RankReplay(
                replay=replay,
                exposed=tuple(zip((step.exposed_comm for step in measured), exposed, strict=True)),
                waited=float(waited[i]),
                last=int(last[i]),
            )
            for i, ((replay, exposed), measured) in enumerate(zip(compare_ranks(ranks, simulated), steps, strict=True))
        ),
    )


def _compute_waits(simulated: RanksSimulation) -> tuple[FloatArray, IntArray]:
    """Seconds each rank waited for others, and how often it came last."""
    timelines, m = simulated.schedule.timelines, simulated.schedule.collectives
    start = np.empty(len(m.collective))
    for number, (timeline, times) in enumerate(zip(timelines, simulated.times, strict=True)):
        launch = np.cumsum(timeline.schedule.code == Code.LAUNCH) - 1
        mine = m.group == number
        start[mine] = times.kernel_start[launch[m.instruction[mine]]]
    latest = np.full(len(m.seconds), -np.inf)
    np.maximum.at(latest, m.collective, start)
    waited = np.zeros(len(timelines))
    np.add.at(waited, m.group, latest[m.collective] - start)
    last = np.zeros(len(timelines), dtype=np.int64)
    np.add.at(last, m.group[start == latest[m.collective]], 1)
    return waited, last


@dataclass(frozen=True, kw_only=True)
class TogetherShares(StepShares):
    """One step of one rank, replayed and predicted with all ranks. Stages: simulation, kernels, collectives, overheads.

    `exposed_measured` and `exposed` are the seconds of exposed communication, measured and predicted.
    """

    exposed_measured: float
    exposed: float


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedRanksPrediction:
    """All ranks predicted together. `transfers` are (kind, bytes, measured, predicted seconds) by collective,
    `difference` what predicted less measured is called ("change" from one device to another)."""

    topology: str
    difference: str
    steps: tuple[tuple[TogetherShares, ...], ...]
    transfers: tuple[tuple[str, int, float, float], ...]
    full: tuple[Replay, ...]

    @property
    def gmae(self) -> float:
        """Geometric mean of the absolute relative errors of all steps of all ranks."""
        return compute_gmae([step.error for steps in self.steps for step in steps])

    def to_dict(self, numbers: Sequence[int]) -> dict[str, Any]:
        """In milliseconds and microseconds, as the names say; `numbers` are those of the ranks."""
        return {
            "topology": self.topology,
            "gmae": self.gmae if self.difference == "error" else None,
            "steps": [
                {
                    "rank": number, "number": s.number, "measured_ms": 1e3 * s.measured, "predicted_ms": 1e3 * s.full,
                    "error": s.error, "shares": s.compute_shares(),
                    "exposed_comm_ms": 1e3 * s.exposed_measured, "predicted_exposed_comm_ms": 1e3 * s.exposed,
                }
                for number, steps in zip(numbers, self.steps, strict=True)
                for s in steps
            ],
            "transfers": [
                {"kind": kind, "message_bytes": size, "measured_us": 1e6 * measured, "predicted_us": 1e6 * predicted}
                for kind, size, measured, predicted in self.transfers
            ],
        }  # fmt: skip


def predict_ranks(
    ranks: Sequence[Linked],
    attributions: Sequence[Attribution],
    replayed: RanksReplay,
    topology: Topology,
) -> TracedRanksPrediction:
    """Simulates all ranks with predicted kernels, then predicted transfers, then pooled overheads too."""
    base = replayed.simulation.schedule
    measured, seconds = base.collectives.seconds, _predict_transfers(replayed.matches.collectives, topology)
    kernels = replace(base, timelines=tuple(attribution.predicted for attribution in attributions))
    collectives = kernels.replace_seconds(seconds)
    full = replace(collectives, timelines=tuple(attribution.complete for attribution in attributions))
    simulations = [compare_ranks(ranks, simulate_together(stage)) for stage in (kernels, collectives, full)]
    return TracedRanksPrediction(
        topology=topology.key,
        difference=attributions[0].difference,
        steps=tuple(
            _make_shares(rank, [simulation[i] for simulation in simulations]) for i, rank in enumerate(replayed.ranks)
        ),
        transfers=tuple(
            (match.kind, compute_message_bytes(match, _count_ranks(match)), float(m), float(p))
            for match, m, p in zip(replayed.matches.collectives, measured, seconds, strict=True)
        ),
        full=tuple(replay for replay, _ in simulations[-1]),
    )


def _make_shares(rank: RankReplay, simulations: Sequence[tuple[Replay, list[float]]]) -> tuple[TogetherShares, ...]:
    stages = [rank.replay.simulated, *(replay.simulated for replay, _ in simulations)]
    names = ("simulation", "kernels", "collectives", "overheads")
    return tuple(
        TogetherShares(
            number=step.number,
            measured=step.measured,
            stages=dict(zip(names, lengths, strict=True)),
            exposed_measured=measured,
            exposed=predicted,
        )
        for step, (measured, _), predicted, lengths in zip(
            rank.replay.steps, rank.exposed, simulations[-1][1], np.stack(stages, axis=1).tolist(), strict=True
        )
    )


def _predict_transfers(matches: Sequence[Match], topology: Topology) -> FloatArray:
    """Predicted seconds of every collective from its last arrival; as measured where the trace has no size."""
    seconds = np.array([match.seconds for match in matches])
    known = [i for i, match in enumerate(matches) if compute_message_bytes(match, _count_ranks(match)) >= 0]
    calls = [_make_call(matches[i], topology) for i in known]
    if calls:
        seconds[known] = load_shipped_collectives().predict(Calls.of(COLLECTIVE, calls), topology).seconds
    return seconds


def _count_ranks(match: Match) -> int:
    return max(match.calls[0].group_size, len(match.members))


def _make_call(match: Match, topology: Topology) -> KernelCall:
    ranks = _count_ranks(match)
    group = match.calls[0].group_ranks
    nodes = len({rank // topology.gpus_per_node for rank in group}) if group else topology.count_nodes(ranks)
    return COLLECTIVE.call(match.kind, "fp32", bytes=compute_message_bytes(match, ranks), ranks=ranks, nodes=nodes)


def compute_message_bytes(match: Match, ranks: int) -> int:
    """nccl-tests' size of a collective of this many ranks: the larger buffer of one, -1 where the trace does not
    say."""
    sent = max(call.message_bytes for call in match.calls)
    received = max(call.output_bytes for call in match.calls)
    if match.kind in COLLECTIVES and COLLECTIVES[match.kind].gathers:
        return received if received >= 0 else sent * ranks if sent >= 0 else -1
    splits = [call.in_splits for call in match.calls]
    if match.kind in UNEVEN_FORM and all(len(sizes) == len(match.members) and sum(sizes) for sizes in splits):
        items = [[call.message_bytes * n / sum(call.in_splits) for n in call.in_splits] for call in match.calls]
        return round(share_bytes_evenly(items))
    return sent

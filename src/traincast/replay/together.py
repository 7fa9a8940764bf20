"""All ranks of a traced run replayed together: a collective ends when the last rank has come and the transfer is done.

A replay of one rank takes its collectives' durations as measured, waiting for other ranks included. Here only the
transfer is measured, which is what the rank that came last needed; who waits for whom and for how long is walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.arrays import BoolArray, FloatArray, IntArray
from traincast.replay.timeline import Replay, TimelineInstructions, compare, step_edges
from traincast.traces.breakdown import StepBreakdown
from traincast.traces.classify import COMMUNICATION, kernel_family
from traincast.traces.intervals import Intervals
from traincast.traces.link import Linked
from traincast.traces.matched_collectives import Matches
from traincast.walk.one_rank import Clocks, RankTimes
from traincast.walk.ranks import Crew, CrewWalk, Meetings, Stuck, walk_ranks
from traincast.walk.schedule import Code


@dataclass(frozen=True, eq=False, kw_only=True)
class RanksSchedule:
    """The instructions of all ranks, when each rank begins (seconds on a common clock), and its collectives.

    Entry i says that launch `instruction[i]` of rank `rank[i]` takes part in collective `meeting[i]`, which lasts
    `seconds[meeting[i]]` from the last arrival.
    """

    instructions: tuple[TimelineInstructions, ...]
    begin: FloatArray
    meeting: IntArray
    rank: IntArray
    instruction: IntArray
    seconds: FloatArray


@dataclass(frozen=True, eq=False, kw_only=True)
class RanksWalk:
    """What the walk made of all ranks: one crew a rank, on the common clock."""

    schedule: RanksSchedule
    meetings: Meetings
    walks: tuple[CrewWalk, ...]

    @property
    def times(self) -> list[RankTimes]:
        """When every instruction of each rank was done."""
        return [each.times(0) for each in self.walks]


@dataclass(frozen=True, eq=False, kw_only=True)
class RankReplay:
    """One rank of a replay of all. `exposed` is exposed communication per step, measured and walked; `waited` the time
    that its collectives waited for other ranks over the whole walk, in seconds; `last` how often it came last."""

    replay: Replay
    exposed: tuple[tuple[float, float], ...]
    waited: float
    last: int


@dataclass(frozen=True, eq=False, kw_only=True)
class RanksReplay:
    """All ranks replayed together."""

    matches: Matches
    walked: RanksWalk
    ranks: tuple[RankReplay, ...]

    @property
    def slowest(self) -> tuple[float, float]:
        """Measured and walked seconds of the slowest rank: the longest of the ranks' median steps."""
        steps = [[(s.measured, s.walked) for s in rank.replay.steps] for rank in self.ranks]
        measured, walked = (max(float(np.median([s[i] for s in each])) for each in steps) for i in (0, 1))
        return measured, walked


def compile_ranks(
    ranks: Sequence[Linked], instructions: Sequence[TimelineInstructions], matches: Matches
) -> RanksSchedule:
    """Puts the instructions of all ranks on one clock and finds their collectives among them."""
    first = min(each.origin for each in instructions)
    begin = np.array([float(each.origin - first) for each in instructions]) - matches.offset
    places = _launches(ranks, instructions)
    entries = [
        (number, member, int(places[member][call.row]))
        for number, match in enumerate(matches.collectives)
        for member, call in zip(match.members, match.calls, strict=True)
    ]
    meeting, rank, instruction = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    # what kept a kernel that was ready from starting is part of its length: that of the last rank counts too
    seconds = np.full(len(matches.collectives), np.inf)
    lengths = [instructions[r].kernel_seconds[i] for r, i in zip(rank.tolist(), instruction.tolist(), strict=True)]
    np.minimum.at(seconds, meeting, lengths)
    return RanksSchedule(
        instructions=tuple(instructions),
        begin=1e-9 * (begin - begin.min()),
        meeting=meeting,
        rank=rank,
        instruction=instruction,
        seconds=seconds,
    )


def _launches(ranks: Sequence[Linked], instructions: Sequence[TimelineInstructions]) -> list[IntArray]:
    """For every rank the instruction that launches each event; -1 for none."""
    places = []
    for linked, own in zip(ranks, instructions, strict=True):
        place = np.full(len(linked.events), -1, dtype=np.int64)
        launches = np.flatnonzero((own.schedule.code == Code.LAUNCH) & (own.point >= 0))
        place[own.row[launches]] = launches
        places.append(place)
    return places


def _launched(ranks: Sequence[Linked], instructions: Sequence[TimelineInstructions], matches: Matches) -> Matches:
    """The collectives that every member launched by a call that the walk knows; others stay as measured."""
    places = _launches(ranks, instructions)
    found = tuple(
        match
        for match in matches.collectives
        if all(places[member][call.row] >= 0 for member, call in zip(match.members, match.calls, strict=True))
    )
    return replace(matches, collectives=found)


def walk_together(schedule: RanksSchedule) -> RanksWalk:
    """Walks all ranks; raises `Stuck` if the collectives cannot be as they were matched."""
    crews = [Crew(c.schedule, c.host_seconds[None], c.kernel_seconds[None]) for c in schedule.instructions]
    meetings = Meetings(
        schedule.meeting, schedule.rank, np.zeros_like(schedule.rank), schedule.instruction, schedule.seconds
    )
    walks = walk_ranks(crews, meetings, clocks=[[clocks] for clocks in _clocks(schedule)])
    return RanksWalk(schedule=schedule, meetings=meetings, walks=tuple(walks))


def _clocks(schedule: RanksSchedule) -> list[Clocks]:
    clocks = []
    for each, begin in zip(schedule.instructions, schedule.begin.tolist(), strict=True):
        s = each.schedule
        clocks.append(Clocks([begin] * s.num_threads, [begin] * s.num_streams, [begin] * s.num_events))
    return clocks


def replay_ranks(
    ranks: Sequence[Linked],
    instructions: Sequence[TimelineInstructions],
    matches: Matches,
    steps: Sequence[Sequence[StepBreakdown]],
) -> RanksReplay | None:
    """Replays all ranks together, or gives None where no collective could be matched or they contradict each other."""
    matches = _launched(ranks, instructions, matches)
    if not matches.collectives:
        return None
    schedule = compile_ranks(ranks, instructions, matches)
    try:
        walked = walk_together(schedule)
    except Stuck:
        return None
    waited, last = _waits(walked)
    rows = zip(ranks, schedule.instructions, walked.times, steps, strict=True)
    return RanksReplay(
        matches=matches,
        walked=walked,
        ranks=tuple(
            RankReplay(
                replay=compare(linked, own, times, float(schedule.begin[i])),
                exposed=tuple(zip((s.exposed_comm for s in measured), exposed(linked, own, times), strict=True)),
                waited=float(waited[i]),
                last=int(last[i]),
            )
            for i, (linked, own, times, measured) in enumerate(rows)
        ),
    )


def _waits(walked: RanksWalk) -> tuple[FloatArray, IntArray]:
    """Seconds each rank waited for others, and how often it came last."""
    schedule, start = walked.schedule, np.empty(len(walked.schedule.meeting))
    for number, (own, times) in enumerate(zip(schedule.instructions, walked.times, strict=True)):
        launch = np.cumsum(own.schedule.code == Code.LAUNCH) - 1
        mine = schedule.rank == number
        start[mine] = times.kernel_start[launch[schedule.instruction[mine]]]
    latest = np.full(len(schedule.seconds), -np.inf)
    np.maximum.at(latest, schedule.meeting, start)
    size = len(schedule.instructions)
    waited = np.zeros(size)
    np.add.at(waited, schedule.rank, latest[schedule.meeting] - start)
    last = np.zeros(size, dtype=np.int64)
    np.add.at(last, schedule.rank[start == latest[schedule.meeting]], 1)
    return waited, last


def exposed(linked: Linked, instructions: TimelineInstructions, times: RankTimes) -> list[float]:
    """Seconds of every walked step in which a collective ran and nothing else did."""
    rows = instructions.row[instructions.schedule.code == Code.LAUNCH]
    family = np.array([kernel_family(name) == COMMUNICATION for name in linked.trace.names])
    communicates: BoolArray = family[linked.events["name"][rows]]
    start, end = (np.rint(1e9 * moment).astype(np.int64) for moment in (times.kernel_start, times.kernel_end))
    compute = Intervals.union(start[~communicates], end[~communicates])
    comm = Intervals.union(start[communicates], end[communicates])
    if linked.marked:
        edges = np.rint(1e9 * step_edges(instructions, times)).astype(np.int64).tolist()
    else:
        edges = [int(min(start.min(initial=0), 0)), int(end.max(initial=0))]
    return [
        1e-9 * comm.clip(low, high).minus(compute.clip(low, high)) for low, high in zip(edges, edges[1:], strict=False)
    ]

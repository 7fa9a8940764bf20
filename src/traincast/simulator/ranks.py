"""The walk over many ranks: every rank's host threads and streams, tied together where kernels meet.

A collective starts on each rank when its stream comes to it, and ends on all of them when the last one has arrived and
the exchange is done. A block of a rank's step is walked as soon as all it needs is known, so that independent
communicators and messages in opposite directions overlap, and what can never be known is a deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from traincast.simulator.blocks import BlockKind, cut
from traincast.simulator.clocks import Clocks
from traincast.simulator.crew import ALL, Crew, CrewWalk, Rows
from traincast.utils.arrays import FloatArray, IntArray
from traincast.utils.errors import TraincastError

__all__ = ["Agenda", "Crew", "CrewWalk", "Meetings", "Stuck", "Waiting", "walk_ranks"]


@dataclass(frozen=True, eq=False, slots=True)
class Meetings:
    """Which launches are one collective: one entry per launch that takes part, and `seconds` per meeting.

    Launch `instruction` of rank `row` of crew `crew` takes part in meeting `meeting`, which ends on all its members
    `seconds[meeting]` after the last of them started. A crew's ranks have their meetings at the same instructions.
    """

    meeting: IntArray
    crew: IntArray
    row: IntArray
    instruction: IntArray
    seconds: FloatArray

    @staticmethod
    def none() -> Meetings:
        """Nobody meets anybody."""
        empty = np.empty(0, dtype=np.int64)
        return Meetings(empty, empty, empty, empty, np.empty(0))


@dataclass(frozen=True, slots=True)
class Waiting:
    """A launch that waits for ever: entry `entry` of the meetings, and the entries that never arrive."""

    entry: int
    missing: tuple[int, ...]


class Stuck(TraincastError):
    """Ranks wait for each other for ever. `waiting` are the launches that arrived, in order of their entries."""

    def __init__(self, waiting: tuple[Waiting, ...]) -> None:
        super().__init__(f"{len(waiting)} collectives wait for ranks that never arrive")
        self.waiting = waiting


class Agenda:
    """The meetings of crews, prepared for walks: which blocks they are, and who takes part in each."""

    def __init__(self, crews: Sequence[Crew], meetings: Meetings) -> None:
        self.meetings, self.sizes = meetings, [crew.size for crew in crews]
        places = [np.unique(meetings.instruction[meetings.crew == number]) for number in range(len(crews))]
        self.blocks = [cut(c.schedule, tuple(met.tolist())) for c, met in zip(crews, places, strict=True)]
        self.count = np.bincount(meetings.meeting, minlength=len(meetings.seconds))

    @cached_property
    def together(self) -> dict[int, int] | None:
        """Block -> meeting, if there is one crew and all its ranks meet at one instruction every time; else None."""
        m = self.meetings
        if len(self.sizes) != 1 or np.any(self.count != self.sizes[0]):
            return None
        first = np.zeros(len(self.count), dtype=np.int64)
        first[m.meeting] = m.instruction
        if np.any(first[m.meeting] != m.instruction):
            return None
        return {self.blocks[0].meetings[int(i)]: meeting for meeting, i in enumerate(first.tolist())}

    @cached_property
    def block(self) -> IntArray:
        """The block of every entry."""
        places = zip(self.meetings.crew.tolist(), self.meetings.instruction.tolist(), strict=True)
        return np.array([self.blocks[crew].meetings[i] for crew, i in places], dtype=np.int64)

    @cached_property
    def members(self) -> list[IntArray]:
        """The entries of every meeting, in order of crew, block and row."""
        m = self.meetings
        order = np.lexsort((m.row, self.block, m.crew, m.meeting))
        return np.split(order, np.cumsum(self.count)[:-1])

    @cached_property
    def entry(self) -> dict[tuple[int, int], IntArray]:
        """The entry of every rank of a crew at each of its meetings, by crew and block."""
        table = {
            (crew, block): np.full(self.sizes[crew], -1, dtype=np.int64)
            for crew, blocks in enumerate(self.blocks)
            for block in blocks.meetings.values()
        }
        entries = np.arange(len(self.block))
        for part in _split(entries, self.keys(entries)):
            table[int(self.meetings.crew[part[0]]), int(self.block[part[0]])][self.meetings.row[part]] = part
        if any(bool(np.any(entries < 0)) for entries in table.values()):
            raise AssertionError("the ranks of a crew must have their meetings at the same instructions")
        return table

    def keys(self, entries: IntArray) -> IntArray:
        """A number for the crew and block of entries."""
        most = max(len(blocks.blocks) for blocks in self.blocks)
        return np.asarray(self.meetings.crew[entries] * most + self.block[entries])


def walk_ranks(
    crews: Sequence[Crew],
    meetings: Meetings,
    *,
    gap: float = 0.0,
    clocks: Sequence[Sequence[Clocks]] | None = None,
    agenda: Agenda | None = None,
    like: Sequence[CrewWalk] | None = None,
    kernel_seconds: Sequence[FloatArray] | None = None,
) -> list[CrewWalk]:
    """Executes the instructions of all crews from their `clocks` (default: idle at 0).

    `gap` is the time in seconds between kernels queued in one stream. Raises `Stuck` on a deadlock. Walks of the same
    crews may share an `agenda`, take from one `like` them what cannot have changed, and have `kernel_seconds` (see
    `CrewWalk`) in place of the crews' own.
    """
    agenda = agenda or Agenda(crews, meetings)
    walks = []
    for number, crew in enumerate(crews):
        begin = clocks[number] if clocks else [Clocks.at_zero(crew.schedule, gap)] * crew.size
        earlier, kernels = like[number] if like else None, kernel_seconds[number] if kernel_seconds else None
        walks.append(CrewWalk(crew, agenda.blocks[number], begin, gap, earlier, kernels))
    if len(meetings.meeting) and agenda.together is None:
        _Dataflow(walks, agenda).run()
        return walks
    for walk in walks:
        _in_order(walk, meetings.seconds, agenda.together or {})
    return walks


def _in_order(walk: CrewWalk, seconds: FloatArray, meetings: dict[int, int]) -> None:
    """Walks ranks that meet nobody, or always all of each other: blocks can be taken in their order."""
    for number, block in enumerate(walk.blocks.blocks):
        walk.run(block, ALL)
        if block.kind == BlockKind.MEETING:
            walk.values[block.begin] = walk.starts[block.first].max() + seconds[meetings[number]]


class _Dataflow:
    """Walks blocks of several crews as what they need becomes known."""

    def __init__(self, walks: list[CrewWalk], agenda: Agenda) -> None:
        self.walks, self.agenda, self.meetings = walks, agenda, agenda.meetings
        # what each block of each crew still needs: one number while all ranks agree, else one a rank
        self.needs: list[list[int | IntArray]] = [list(blocks.needs) for blocks in agenda.blocks]
        self.queue: list[tuple[int, int]] = []  # (block, crew): earliest first, so that ranks stay side by side
        self.ready: dict[tuple[int, int], list[Rows]] = {}
        self.missing = agenda.count.copy()
        self.last = np.full(len(self.missing), -np.inf)

    def run(self) -> None:
        for crew, walk in enumerate(self.walks):
            for block, needs in enumerate(walk.blocks.needs):
                if needs == 0:
                    self._push(crew, block, ALL)
        while self.queue:
            block, crew = heapq.heappop(self.queue)
            walk = self.walks[crew]
            parts = self.ready.pop((block, crew))
            rows = parts[0] if len(parts) == 1 else self._union(parts, walk.crew.size)
            walk.run(walk.blocks.blocks[block], rows)
            if walk.blocks.blocks[block].kind == BlockKind.MEETING:
                self._arrive(crew, block, rows)
            else:
                self._finish(crew, block, rows)
        if np.any(self.missing > 0):
            raise self._stuck()

    def _push(self, crew: int, block: int, rows: Rows) -> None:
        key = (block, crew)
        if key not in self.ready:
            heapq.heappush(self.queue, key)
            self.ready[key] = []
        self.ready[key].append(rows)

    @staticmethod
    def _union(parts: list[Rows], size: int) -> Rows:
        rows = np.concatenate([part for part in parts if not isinstance(part, slice)])
        return ALL if len(rows) == size else rows

    def _finish(self, crew: int, block: int, rows: Rows) -> None:
        """What needed this block needs one thing less."""
        needs = self.needs[crew]
        for successor in self.walks[crew].blocks.successors[block]:
            count = needs[successor]
            if isinstance(count, int) and isinstance(rows, slice):
                needs[successor] = count - 1
                if count == 1:
                    self._push(crew, successor, ALL)
                continue
            if isinstance(count, int):
                count = needs[successor] = np.full(self.walks[crew].crew.size, count, dtype=np.int64)
            count[rows] -= 1
            done = np.flatnonzero(count == 0) if isinstance(rows, slice) else rows[count[rows] == 0]
            if len(done):
                self._push(crew, successor, ALL if len(done) == len(count) else done)

    def _arrive(self, crew: int, block: int, rows: Rows) -> None:
        """Ranks have come to a meeting; whichever meetings are complete end."""
        meeting = self.meetings.meeting[self.agenda.entry[crew, block][rows]]
        walk = self.walks[crew]
        np.maximum.at(self.last, meeting, walk.starts[walk.blocks.blocks[block].first, rows])
        np.subtract.at(self.missing, meeting, 1)
        complete = np.unique(meeting[self.missing[meeting] == 0])
        if len(complete):
            entries = np.concatenate([self.agenda.members[m] for m in complete.tolist()])
            for part in _split(entries, self.agenda.keys(entries)):
                self._end(part)

    def _end(self, entries: IntArray) -> None:
        """Ends a meeting for the ranks of one crew at one instruction."""
        m = self.meetings
        crew, block, rows = int(m.crew[entries[0]]), int(self.agenda.block[entries[0]]), m.row[entries]
        walk = self.walks[crew]
        every: Rows = ALL if len(rows) == walk.crew.size else rows
        meeting = m.meeting[entries]
        walk.values[walk.blocks.blocks[block].begin, rows] = self.last[meeting] + m.seconds[meeting]
        self._finish(crew, block, every)

    def _stuck(self) -> Stuck:
        arrived = np.zeros(len(self.meetings.meeting), dtype=bool)
        for (crew, block), entries in self.agenda.entry.items():
            arrived[entries] = np.asarray(self.needs[crew][block]) == 0
        waiting = []
        for entry in np.flatnonzero(arrived & (self.missing[self.meetings.meeting] > 0)).tolist():
            members = self.agenda.members[self.meetings.meeting[entry]]
            waiting.append(Waiting(entry, tuple(sorted(members[~arrived[members]].tolist()))))
        return Stuck(tuple(waiting))


def _split(entries: IntArray, keys: IntArray) -> list[IntArray]:
    """Entries of equal keys together."""
    if np.all(keys == keys[0]):
        return [entries]
    order = np.argsort(keys, kind="stable")
    return np.split(entries[order], np.flatnonzero(np.diff(keys[order])) + 1)

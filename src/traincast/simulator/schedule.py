"""A program as the flat list of instructions that the simulation executes, cut into blocks that nothing outside can
interrupt.

Between two synchronisations a thread only adds up its host times, and between two waits a stream only queues its
kernels. Such a run is one block, simulated with a few array operations for any number of ranks at once. Every value a
block needs or makes has a column: the clocks at the start, the host time after each instruction, and the end of each
kernel. Anything else, such as an event, is the latest of a few columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.host.profile import AFTER, ALONE, BEFORE, BETWEEN
from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.lower import LoweredProgram
from traincast.costs.kernels.registry import Control, ControlKind
from traincast.ir.program import Program
from traincast.utils.arrays import IndexArray, Int32Array, IntArray


class Code(IntEnum):
    """What an instruction does. Every instruction first advances its host thread by its host seconds."""

    HOST = 0
    LAUNCH = 1
    DEVICE_SYNCHRONIZE = 2
    STREAM_SYNCHRONIZE = 3
    EVENT_RECORD = 4
    STREAM_WAIT_EVENT = 5
    EVENT_SYNCHRONIZE = 6
    JOIN = 7


RUNTIME_CALLS = ("launch", "memcpy", "memset", "synchronize")
_LAUNCH, _MEMCPY, _MEMSET, _SYNCHRONIZE = range(4)
_CONTROL_CODE = {
    ControlKind.DEVICE_SYNCHRONIZE: Code.DEVICE_SYNCHRONIZE,
    ControlKind.STREAM_SYNCHRONIZE: Code.STREAM_SYNCHRONIZE,
    ControlKind.EVENT_RECORD: Code.EVENT_RECORD,
    ControlKind.STREAM_WAIT_EVENT: Code.STREAM_WAIT_EVENT,
    ControlKind.EVENT_SYNCHRONIZE: Code.EVENT_SYNCHRONIZE,
}


@dataclass(frozen=True, eq=False, slots=True)
class Schedule:
    """Instructions as columns.

    `target` is the stream (launches, stream synchronise, record, wait), the event (event synchronise) or the
    thread waited for (join); `event` belongs to record and wait. `name` indexes the scope names and `part` says
    which share of a scope's host time a HOST instruction takes; `runtime` which runtime call the others make.
    `call` is the kernel call of a launch, `op` the op behind an instruction (-1 for none), `scope` its scope.
    """

    code: Int32Array
    thread: Int32Array
    target: Int32Array
    event: Int32Array
    name: Int32Array
    part: Int32Array
    runtime: Int32Array
    call: Int32Array
    op: Int32Array
    scope: Int32Array
    num_threads: int
    num_streams: int
    num_events: int


class Scheduler:
    """Makes schedules from `calls`. Programs that differ only in the sizes of theirs share all columns but `call`."""

    def __init__(self, calls: tuple[KernelCall, ...]) -> None:
        self._runtime = np.array([_classify_runtime_call(call) for call in calls], dtype=np.int64)
        self._known: dict[tuple[int, bytes, bytes], tuple[Schedule, _Layout]] = {}

    def schedule(self, program: Program, lowered: LoweredProgram) -> Schedule:
        """The instructions of one step: per scope its host time before, between and after its launches."""
        counts = np.array([len(row) for row in lowered.items], dtype=np.int64)
        items = np.array([item for row in lowered.items for item in row], dtype=np.int64)
        runtime = self._runtime
        form = np.where(items < 0, items, runtime[np.maximum(items, 0)]) if len(runtime) else items
        key = (id(program.columns), counts.tobytes(), form.tobytes())
        if key not in self._known:
            layout = _Layout(program, counts)
            self._known[key] = (layout.schedule(items, runtime, lowered.controls), layout)
        schedule, layout = self._known[key]
        return replace(schedule, call=layout.calls(items))


def build_schedule(program: Program, lowered: LoweredProgram) -> Schedule:
    """The instructions of one step."""
    return Scheduler(lowered.calls).schedule(program, lowered)


class _Layout:
    """Where the items of a program's ops go among its instructions.

    A scope is a join if it must wait, then two instructions a launch (the host time before it, and itself) and one a
    control, then the host time after the last.
    """

    def __init__(self, program: Program, counts: IntArray) -> None:
        c = self.columns = program.columns
        self.names = c.scope_name
        per_op = counts[c.op_signature] if len(counts) else np.zeros(0, dtype=np.int64)
        self.op = np.repeat(np.arange(program.num_ops), per_op)
        begin = np.concatenate(([0], np.cumsum(counts)))[c.op_signature] if len(counts) else per_op
        first = np.cumsum(per_op) - per_op
        self.item = np.arange(len(self.op)) - first[self.op] + begin[self.op]  # which item of all signatures' items
        self.scope = program.op_scope[self.op]

    def schedule(self, items: IntArray, runtime: IntArray, controls: tuple[Control, ...]) -> Schedule:
        """All columns."""
        c = self.columns
        scopes = len(c.scope_name)
        item = items[self.item]
        launches = item >= 0
        joins = c.scope_after >= 0
        size = np.where(launches, 2, 1)
        end = np.cumsum(joins + np.bincount(self.scope, weights=size, minlength=scopes).astype(np.int64) + 1)
        # the instruction of each item
        inside: IntArray = np.cumsum(size) + self.scope + np.cumsum(joins, dtype=np.int64)[self.scope] - 1
        table = np.full((10, int(end[-1]) if scopes else 0), -1, dtype=np.int32)
        code, thread, target, event, name, part, run, call, op, scope = table
        code[:] = Code.HOST
        scope[:] = np.repeat(np.arange(scopes), np.diff(end, prepend=0))
        thread[:] = c.scope_thread[scope]
        self._host(inside[launches], end - 1, part)
        host = part >= 0
        name[host] = c.scope_name[scope[host]]
        begin = (end - np.diff(end, prepend=0))[joins]
        code[begin], target[begin] = Code.JOIN, c.scope_thread[c.scope_after[joins]]
        at = self.launches = inside[launches]
        self.launch_item, self.length = self.item[launches], table.shape[1]
        code[at], target[at] = Code.LAUNCH, c.op_stream[self.op[launches]]
        run[at], call[at], op[at] = runtime[item[launches]], item[launches], self.op[launches]
        at = inside[~launches]
        op[at], run[at] = self.op[~launches], _SYNCHRONIZE
        code[at], target[at], event[at] = self._controls(-1 - item[~launches], controls, self.op[~launches])
        return count_resources(table)

    def _host(self, launches: IntArray, ends: IntArray, part: Int32Array) -> None:
        """Marks which share of its scope's host time each host instruction takes."""
        part[launches - 1] = BETWEEN
        part[ends] = ALONE
        scope_of = np.searchsorted(ends, launches)
        starts, first = np.unique(scope_of, return_index=True)
        part[launches[first] - 1] = BEFORE
        part[ends[starts]] = AFTER

    def _controls(
        self, number: IntArray, controls: tuple[Control, ...], op: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        table = [(_CONTROL_CODE[control.kind], control.event, control.stream) for control in controls]
        code, event, stream = np.array(table, dtype=np.int64).reshape(len(table), 3)[number].T
        queue = np.where(stream < 0, self.columns.op_stream[op], stream)
        return code, np.where(code == Code.EVENT_SYNCHRONIZE, event, queue), event

    def calls(self, items: IntArray) -> Int32Array:
        """The column `call`."""
        call = np.full(self.length, -1, dtype=np.int32)
        call[self.launches] = items[self.launch_item]
        return call


def _classify_runtime_call(call: KernelCall) -> int:
    if call.family.name != "memcpy":
        return _LAUNCH
    return _MEMSET if call.kind == "memset" else _MEMCPY


def count_resources(table: npt.NDArray[np.int32]) -> Schedule:
    """The schedule of these columns, in the order of its fields, with as many threads, streams and events as they
    use."""
    code, thread, target, event = table[:4]
    on_stream = np.isin(code, [Code.LAUNCH, Code.STREAM_SYNCHRONIZE, Code.EVENT_RECORD, Code.STREAM_WAIT_EVENT])
    streams = int(target[on_stream].max(initial=0)) + 1
    events = int(max(event.max(initial=-1), target[code == Code.EVENT_SYNCHRONIZE].max(initial=-1))) + 1
    columns: list[Any] = [*table, int(thread.max(initial=0)) + 1, streams, events]
    return Schedule(*columns)


class BlockKind(IntEnum):
    """What a block is: host work of a thread, kernels of a stream, or a kernel that meets those of other ranks."""

    HOST = 0
    KERNELS = 1
    COLLECTIVE = 2


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """One run. It writes the columns `begin` to `end` and cannot start before the columns `waits` allow.

    `first` is where the run starts among the instructions (host) or launches (kernels) in block order. `issue` holds
    the host columns of its kernels; `after` is the column of the thread's clock before host work. `ahead` says of host
    work that nothing on the device can delay it.
    """

    kind: BlockKind
    begin: int
    end: int
    first: int
    waits: tuple[int, ...]
    issue: IndexArray
    after: int = -1
    held: bool = False
    ahead: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """The blocks of a schedule in an order in which each comes after all it needs (collectives aside).

    `host_order` and `launch_order` are instructions in the order of their columns, which start at `host_begin` and
    `launch_begin`. `successors[b]` are the blocks that need block b, `needs[b]` how many blocks b needs. `threads` are
    the columns of the clocks at the end, `streams` and `events` those whose latest is. `collective_blocks` maps the
    instruction of a collective to its block.
    """

    blocks: tuple[Block, ...]
    host_order: IndexArray
    launch_order: IndexArray
    launch_place: IndexArray  # place of each launch, in instruction order, in `launch_order`
    host_begin: int
    launch_begin: int
    num_columns: int
    successors: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...]
    threads: tuple[int, ...]
    streams: tuple[tuple[int, ...], ...]
    events: tuple[tuple[int, ...], ...]
    collective_blocks: dict[int, int]
    owner: IndexArray  # the block that writes each column, -1 for the clocks at the start
    held: IndexArray  # instructions that may hold their thread ...
    held_after: IndexArray  # ... and the column of its clock before them


_LONG = 1 << 17  # instructions: the blocks of more take too much memory to keep many; a step has some thousands


@dataclass(slots=True)
class _Run:
    """A block being gathered; columns are still names (see `_Cutter.name_*`)."""

    kind: BlockKind
    entry: int
    waits: tuple[int, ...] = ()
    after: int = -1
    held: bool = False
    host: int = -1  # for kernels: the entry of the host run they are issued from
    pieces: list[IndexArray] = field(default_factory=list)


def cut_schedule_at_collectives(schedule: Schedule, collectives: tuple[int, ...] = ()) -> Blocks:
    """The blocks of a schedule in which the launches `collectives` (instructions, ascending) meet those of other ranks.
    They are kept for further simulations; of long traces only those simulated last."""
    kept = _kept_last if len(schedule.code) > _LONG else _kept
    return kept(schedule, collectives)


def _cut_uncached(schedule: Schedule, collectives: tuple[int, ...]) -> Blocks:
    cutter = _Cutter(schedule, collectives)
    cutter.gather()
    return cutter.finish()


_kept, _kept_last = lru_cache(maxsize=256)(_cut_uncached), lru_cache(maxsize=1)(_cut_uncached)


class _Cutter:
    """Gathers runs. A column is first known by name: initial clocks as they are, then two names an instruction."""

    def __init__(self, schedule: Schedule, collectives: tuple[int, ...]) -> None:
        self.schedule, self.collectives = schedule, collectives
        self.n = len(schedule.code)
        threads, streams, events = schedule.num_threads, schedule.num_streams, schedule.num_events
        self.base = threads + streams + events
        self.threads = list(range(threads))
        self.streams: list[tuple[int, ...]] = [(threads + s,) for s in range(streams)]
        self.events: list[tuple[int, ...]] = [(threads + streams + e,) for e in range(events)]
        self.open_host: dict[int, _Run] = {}
        self.open_stream: dict[int, _Run] = {}
        self.runs: list[_Run] = []

    def host(self, i: int) -> int:
        """Name of the host time after instruction i."""
        return self.base + i

    def kernel(self, i: int) -> int:
        """Name of the end of the kernel that instruction i launches."""
        return self.base + self.n + i

    def latest(self, *moments: tuple[int, ...]) -> tuple[int, ...]:
        """The names of which one is the latest of all these: of a thread or a stream only its last can be."""
        last: dict[int, int] = {}
        threads = self.schedule.num_threads
        for name in sorted(name for moment in moments for name in moment):
            source = name
            if name >= self.base + self.n:
                source = threads + int(self.schedule.target[name - self.base - self.n])
            elif name >= self.base:
                source = int(self.schedule.thread[name - self.base])
            last[source] = name
        return tuple(last.values())

    def gather(self) -> None:
        """One pass over what is special or changes thread; everything between is taken in whole ranges."""
        code, thread = self.schedule.code, self.schedule.thread
        special = code > Code.LAUNCH
        special[list(self.collectives)] = True
        plain = (code == Code.LAUNCH) & ~special
        self.launches = np.flatnonzero(plain)
        self.launches_before = np.concatenate(([0], np.cumsum(plain))).tolist()
        edges = special.copy()
        edges[1:] |= thread[1:] != thread[:-1]
        places = np.flatnonzero(edges)
        columns = (special, code, thread, self.schedule.target, self.schedule.event)
        begin = 0
        for i, is_special, *what in zip(places.tolist(), *(column[places].tolist() for column in columns), strict=True):
            self._plain(begin, i)
            begin = i
            if is_special:
                self._special(i, *what)
                begin = i + 1
        self._plain(begin, self.n)

    def _plain(self, begin: int, end: int) -> None:
        """Host work and launches of one thread."""
        if begin == end:
            return
        run = self._on_thread(int(self.schedule.thread[begin]), begin, end)
        launches = self.launches[self.launches_before[begin] : self.launches_before[end]]
        if len(launches):
            self._launches(launches, run)

    def _on_thread(self, thread: int, begin: int, end: int) -> _Run:
        run = self.open_host.get(thread)
        if run is None:
            run = _Run(BlockKind.HOST, begin, after=self.threads[thread])
            self.open_host[thread] = run
            self.runs.append(run)
        run.pieces.append(np.arange(begin, end))
        self.threads[thread] = self.host(end - 1)
        return run

    def _launches(self, launches: IndexArray, host: _Run) -> None:
        streams = self.schedule.target[launches]
        first = int(streams[0])
        several = np.unique(streams).tolist() if np.any(streams != first) else [first]
        for stream in several:
            queued = launches[streams == stream] if len(several) > 1 else launches
            run = self.open_stream.get(stream)
            if run is None or run.host != host.entry:
                run = self._stream_run(stream, BlockKind.KERNELS, int(queued[0]), host)
                self.open_stream[stream] = run
            run.pieces.append(queued)
            self.streams[stream] = (self.kernel(int(queued[-1])),)

    def _stream_run(self, stream: int, kind: BlockKind, entry: int, host: _Run) -> _Run:
        run = _Run(kind, entry, waits=self.streams[stream], host=host.entry)
        self.runs.append(run)
        return run

    def _special(self, i: int, code: int, thread: int, target: int, event: int) -> None:
        waits = self._holds(code, target)
        if waits is not None:
            run = _Run(BlockKind.HOST, i, waits=waits, after=self.threads[thread], held=True)
            self.open_host[thread] = run
            self.runs.append(run)
        host = self._on_thread(thread, i, i + 1)
        if code == Code.EVENT_RECORD:
            self.events[event] = self.latest((self.host(i),), self.streams[target])
        elif code == Code.STREAM_WAIT_EVENT:
            self.open_stream.pop(target, None)
            self.streams[target] = self.latest(self.streams[target], self.events[event])
        elif code == Code.LAUNCH:
            self.open_stream.pop(target, None)
            self._stream_run(target, BlockKind.COLLECTIVE, i, host).pieces.append(np.array([i]))
            self.streams[target] = (self.kernel(i),)

    def _holds(self, code: int, target: int) -> tuple[int, ...] | None:
        """What holds the host at this instruction; None for one that holds nobody."""
        if code == Code.JOIN:
            return (self.threads[target],)
        if code == Code.STREAM_SYNCHRONIZE:
            return self.streams[target]
        if code == Code.DEVICE_SYNCHRONIZE:
            return self.latest(*self.streams)
        if code == Code.EVENT_SYNCHRONIZE:
            return self.events[target]
        return None

    def finish(self) -> Blocks:
        """Orders the runs and gives every value its column."""
        runs = sorted(self.runs, key=lambda run: (run.entry, run.kind))
        hosts = [np.concatenate(run.pieces) for run in runs if run.kind == BlockKind.HOST]
        launches = [np.concatenate(run.pieces) for run in runs if run.kind >= BlockKind.KERNELS]
        host_order = np.concatenate(hosts) if hosts else np.empty(0, dtype=np.intp)
        launch_order = np.concatenate(launches) if launches else np.empty(0, dtype=np.intp)
        column = np.full(self.base + 2 * self.n, -1, dtype=np.intp)
        column[: self.base] = np.arange(self.base)
        launch_begin = self.base + len(host_order)
        column[host_order + self.base] = np.arange(self.base, launch_begin)
        column[launch_order + self.base + self.n] = np.arange(launch_begin, launch_begin + len(launch_order))
        return self._numbered(runs, column, host_order, launch_order)

    def _numbered(
        self, runs: list[_Run], column: IndexArray, host_order: IndexArray, launch_order: IndexArray
    ) -> Blocks:
        host_begin, launch_begin = self.base, self.base + len(host_order)
        num_columns = launch_begin + len(launch_order)
        blocks: list[Block] = []
        owner = [-1] * num_columns
        issues, columns = column[launch_order + self.base], column.tolist()
        nothing = issues[:0]
        host_at, launch_at = 0, 0
        for run in runs:
            length = sum(len(block) for block in run.pieces)
            issue = nothing
            if run.kind == BlockKind.HOST:
                first, begin, host_at = host_at, host_begin + host_at, host_at + length
            else:
                first, begin, launch_at = launch_at, launch_begin + launch_at, launch_at + length
                issue = issues[first:launch_at]
            waits = tuple([columns[name] for name in run.waits])
            after = columns[run.after] if run.after >= 0 else -1
            ahead = run.kind == BlockKind.HOST and all(self._ahead(c, blocks, owner) for c in (*waits, after))
            owner[begin : begin + length] = [len(blocks)] * length
            blocks.append(Block(run.kind, begin, begin + length, first, waits, issue, after, run.held, ahead))
        successors, needs = _list_block_edges(blocks, owner)
        held = [(int(host_order[b.first]), b.after) for b in blocks if b.held]
        return Blocks(
            blocks=tuple(blocks), host_order=host_order, launch_order=launch_order,
            launch_place=np.argsort(launch_order), host_begin=host_begin, launch_begin=launch_begin,
            num_columns=num_columns,
            successors=successors, needs=needs,
            threads=tuple(column[self.threads].tolist()),
            streams=tuple(tuple(column[list(stream)].tolist()) for stream in self.streams),
            events=tuple(tuple(column[list(event)].tolist()) for event in self.events),
            collective_blocks={
                int(launch_order[b.first]): i for i, b in enumerate(blocks) if b.kind == BlockKind.COLLECTIVE
            },
            owner=np.array(owner, dtype=np.intp),
            held=np.array([i for i, _ in held], dtype=np.intp),
            held_after=np.array([after for _, after in held], dtype=np.intp),
        )  # fmt: skip

    def _ahead(self, column: int, blocks: list[Block], owner: list[int]) -> bool:
        """Whether a value is a thread's own clock, which nothing on the device can delay."""
        return blocks[owner[column]].ahead if owner[column] >= 0 else column < self.schedule.num_threads


def _list_block_edges(blocks: list[Block], owner: list[int]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    successors: list[list[int]] = [[] for _ in blocks]
    needs = []
    for b, block in enumerate(blocks):
        sources = {owner[column] for column in block.waits}
        if len(block.issue):
            sources.add(owner[block.issue[0]])
        if block.after >= 0:
            sources.add(owner[block.after])
        sources -= {-1, b}
        for source in sources:
            successors[source].append(b)
        needs.append(len(sources))
    return tuple(tuple(blocks_after) for blocks_after in successors), tuple(needs)

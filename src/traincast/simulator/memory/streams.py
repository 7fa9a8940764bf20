"""Blocks that wait for another stream once they are freed, as `record_stream` has them do.

A block belongs to the stream it was allocated on. Where another stream works on it and its own has not waited for that
work when the block is freed, the program has called `record_stream` (else its data could be overwritten): the allocator
records an event on the other stream and gives the block out again when the host finds the event done. Results of
collectives do not wait: PyTorch keeps them until somebody has waited.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.ir.memory import Memory, list_device_storages
from traincast.ir.program import Program
from traincast.simulator.memory.device_memory import list_block_streams
from traincast.simulator.schedule import Code
from traincast.simulator.timeline import Timeline
from traincast.utils.arrays import FloatArray, IntArray


def delay_reuse(memory: Memory, timeline: Timeline) -> Memory:
    """The memory of a rank with the blocks that wait for another stream in this step of it."""
    program = timeline.program
    storages = list_device_storages(program)
    # a class of ranks has one timeline, and its fullest rank may have another program
    if not np.array_equal(memory.events.nbytes[: len(storages)], program.storage_nbytes[storages]):
        return memory
    late = _find_waiting_blocks(program, np.array(list_block_streams(memory.events)), timeline)
    return Memory(replace(memory.events, late=late)) if late else memory


def _find_waiting_blocks(program: Program, streams: IntArray, timeline: Timeline) -> dict[int, int]:
    """The tick from which each block can be given out again that waits for another stream, by its number. `streams` are
    those that the blocks were allocated on."""
    c, storages = program.columns, list_device_storages(program)
    if not len(storages) or not c.op_stream.any():
        return {}
    row = np.full(len(c.storage_bytes), -1, dtype=np.int64)
    row[storages] = np.arange(len(storages))
    last = _find_last_foreign_use(program, row, streams)
    if not last:
        return {}
    clock, done = _follow_host(program, timeline)
    covered = _Waits(timeline)
    found: dict[int, int] = {}
    for (number, stream), op in last.items():
        free = int(c.storage_free[storages[number]])
        if stream not in done:  # what was asked of it launched no kernel: nothing is waited for
            continue
        if free >= program.num_ops or covered.has_waited(int(streams[number]), stream, after=op, before=free):
            continue
        ready = int(np.searchsorted(clock, done[stream][free]))  # the first op whose host finds the event done
        if ready > free + 1:  # the next op is the first that could have it
            found[number] = max(found.get(number, 0), 2 * ready)
    return found


def _find_last_foreign_use(program: Program, row: IntArray, streams: IntArray) -> dict[tuple[int, int], int]:
    """The last op on another stream than its own that works on a block, by block and stream."""
    c = program.columns
    exchanges = np.array([signature.name.startswith("c10d::") for signature in program.symbolic], dtype=np.bool_)
    found: dict[tuple[int, int], int] = {}
    for pointer, tensor in ((c.input_ptr, c.input_tensor), (c.output_ptr, c.output_tensor)):
        op = np.repeat(np.arange(program.num_ops), np.diff(pointer))
        number = row[c.tensor_storage[tensor]]
        foreign = (number >= 0) & (c.op_stream[op] != streams[np.maximum(number, 0)]) & ~exchanges[c.op_signature[op]]
        for key in zip(number[foreign].tolist(), c.op_stream[op[foreign]].tolist(), op[foreign].tolist(), strict=True):
            found[key[:2]] = max(found.get(key[:2], -1), key[2])
    return found


def _follow_host(program: Program, timeline: Timeline) -> tuple[FloatArray, dict[int, FloatArray]]:
    """When the host has issued each op, and by stream when all is done that was on it by then; seconds."""
    launched, times = timeline.launches, timeline.times
    op, stream = timeline.schedule.op[launched], timeline.schedule.target[launched]
    clock = np.zeros(program.num_ops)
    known = op >= 0
    np.maximum.at(clock, op[known], times.host_after[launched][known])
    done = {}
    for number in np.unique(stream).tolist():
        ends = np.zeros(program.num_ops)
        mine = known & (stream == number)
        np.maximum.at(ends, op[mine], times.kernel_end[mine])
        done[number] = np.maximum.accumulate(ends)
    return np.maximum.accumulate(clock), done


class _Waits:
    """Which streams have waited for which: for a pair, the ops by which the host made the one wait and up to which the
    other's work was waited for."""

    def __init__(self, timeline: Timeline) -> None:
        schedule = timeline.schedule
        op = np.maximum.accumulate(schedule.op)
        recorded: dict[int, tuple[int, int]] = {}
        self._pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        wanted = np.flatnonzero((schedule.code == Code.EVENT_RECORD) | (schedule.code == Code.STREAM_WAIT_EVENT))
        columns = (schedule.code, schedule.target, schedule.event, op)
        for code, target, event, at in zip(*(column[wanted].tolist() for column in columns), strict=True):
            if code == Code.EVENT_RECORD:
                recorded[event] = (target, at)
            elif event in recorded:
                stream, upto = recorded[event]
                self._pairs.setdefault((target, stream), []).append((at, upto))

    def has_waited(self, stream: int, other: int, *, after: int, before: int) -> bool:
        """Whether by op `before` a stream was made to wait for what the other did up to op `after`."""
        return any(at <= before and upto >= after for at, upto in self._pairs.get((stream, other), ()))

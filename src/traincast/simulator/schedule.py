"""A program as the flat list of instructions that the simulation executes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.host.profile import AFTER, ALONE, BEFORE, BETWEEN
from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.lowered import LoweredProgram
from traincast.costs.kernels.registry import Control, ControlKind
from traincast.ir.program import Program
from traincast.utils.arrays import Int32Array, IntArray


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

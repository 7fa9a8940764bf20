"""A program as the flat list of instructions that the walk executes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from traincast.host.profile import AFTER, ALONE, BEFORE, BETWEEN
from traincast.kernels.lowered import LoweredProgram
from traincast.kernels.registry import Control, ControlKind
from traincast.workload.program import Int32Array, Program


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


class _Emitter:
    """Appends instructions row by row; rows become columns at the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int, int, int, int, int, int]] = []

    def host(self, thread: int, name: int, part: int, scope: int) -> None:
        self.rows.append((Code.HOST, thread, -1, -1, name, part, -1, -1, -1, scope))

    def launch(self, thread: int, stream: int, runtime: int, call: int, op: int, scope: int) -> None:
        self.rows.append((Code.LAUNCH, thread, stream, -1, -1, -1, runtime, call, op, scope))

    def control(self, control: Control, thread: int, stream: int, op: int, scope: int) -> None:
        code = _CONTROL_CODE[control.kind]
        target = control.event if code is Code.EVENT_SYNCHRONIZE else (stream if control.stream < 0 else control.stream)
        self.rows.append((code, thread, target, control.event, -1, -1, _SYNCHRONIZE, -1, op, scope))

    def join(self, thread: int, other: int, scope: int) -> None:
        self.rows.append((Code.JOIN, thread, other, -1, -1, -1, -1, -1, -1, scope))


def build_schedule(program: Program, lowered: LoweredProgram) -> Schedule:
    """The instructions of one step: per scope its host time before, between and after its launches."""
    emit = _Emitter()
    runtime = [_runtime_call(call.family.name, call.kind) for call in lowered.calls]
    c = program.columns
    op_signature, op_stream = c.op_signature.tolist(), c.op_stream.tolist()
    scope_ptr, scope_thread = c.scope_ptr.tolist(), c.scope_thread.tolist()
    scope_name, scope_after = c.scope_name.tolist(), c.scope_after.tolist()
    for scope in range(program.num_scopes):
        thread, name = scope_thread[scope], scope_name[scope]
        if scope_after[scope] >= 0:
            emit.join(thread, scope_thread[scope_after[scope]], scope)
        launched = False
        for op in range(scope_ptr[scope], scope_ptr[scope + 1]):
            for item in lowered.items[op_signature[op]]:
                if item >= 0:
                    emit.host(thread, name, BETWEEN if launched else BEFORE, scope)
                    emit.launch(thread, op_stream[op], runtime[item], item, op, scope)
                    launched = True
                else:
                    emit.control(lowered.controls[-1 - item], thread, op_stream[op], op, scope)
        emit.host(thread, name, AFTER if launched else ALONE, scope)
    return _columns(emit.rows)


def _runtime_call(family: str, kind: str) -> int:
    if family != "memcpy":
        return _LAUNCH
    return _MEMSET if kind == "memset" else _MEMCPY


def _columns(rows: list[tuple[int, int, int, int, int, int, int, int, int, int]]) -> Schedule:
    table = np.array(rows, dtype=np.int32).reshape(len(rows), 10)
    columns = (np.ascontiguousarray(table[:, i]) for i in range(10))
    code, thread, target, event, name, part, runtime, call, op, scope = columns
    on_stream = np.isin(code, [Code.LAUNCH, Code.STREAM_SYNCHRONIZE, Code.EVENT_RECORD, Code.STREAM_WAIT_EVENT])
    return Schedule(
        code=code,
        thread=thread,
        target=target,
        event=event,
        name=name,
        part=part,
        runtime=runtime,
        call=call,
        op=op,
        scope=scope,
        num_threads=int(thread.max(initial=0)) + 1,
        num_streams=int(target[on_stream].max(initial=0)) + 1,
        num_events=int(max(event.max(initial=-1), target[code == Code.EVENT_SYNCHRONIZE].max(initial=-1))) + 1,
    )

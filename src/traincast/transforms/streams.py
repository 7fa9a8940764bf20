"""Ops moved to a stream of their own: they wait for what they read, and who reads their results waits for them."""

from __future__ import annotations

from dataclasses import replace

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import Signature
from traincast.ir.program import Program
from traincast.ir.rows import OpRow
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.utils.errors import TraincastError, make_unknown_error

RECORD, WAIT = "cuda::event_record", "cuda::stream_wait_event"


def move_to_stream(step: Workload, name: str, stream: int) -> tuple[Workload, str]:
    """The step with all ops of a name on another stream."""
    names = {signature.name for program in step.programs for signature in program.symbolic}
    if name not in names:
        raise make_unknown_error("op", name, names, "Name one of the step's ops.")
    check_follows_tensors(step)
    programs = tuple(_move_to_stream(program, name, stream) for program in step.programs)
    return replace(step, programs=programs), f"{name} runs on stream {stream}, with events where data crosses"


def _move_to_stream(program: Program, name: str, stream: int) -> Program:
    editor = ProgramEditor(program)
    taken = [signature.scalar("event") for signature in program.signatures]
    events = _Events(1 + max((event for event in taken if isinstance(event, int)), default=-1))
    stays = all(op.stream == stream for op in editor.ops if op.signature.name == name)
    for op in editor.ops:
        if op.signature.name == name:
            op.stream = stream
    writer: dict[int, OpRow] = {}
    for scope in editor.scopes:
        ops: list[OpRow] = []
        for op in scope.ops:
            for source in _find_source_ops(editor, op, writer):
                events.wait(op, source, ops)
            ops.append(op)
            for tensor in op.outputs:
                writer[editor.tensors[tensor]] = op
        scope.ops = ops
    events.record(editor)
    if not events.of and stays:
        return program
    if not events.of:
        raise TraincastError(f"{name} has nothing to wait for and nobody waits for it")
    return editor.build()


def _find_source_ops(editor: ProgramEditor, op: OpRow, writer: dict[int, OpRow]) -> list[OpRow]:
    """Ops of other streams whose results an op reads or overwrites."""
    found: dict[OpRow, None] = {}
    for tensor in (*op.inputs, *op.outputs):
        source = writer.get(editor.tensors[tensor])
        if source is not None and source.stream != op.stream:
            found[source] = None
    return list(found)


class _Events:
    """An event after every op that somebody on another stream waits for."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.of: dict[OpRow, int] = {}
        self.waited: set[tuple[int, int]] = set()

    def wait(self, op: OpRow, source: OpRow, before: list[OpRow]) -> None:
        """The stream of `op` waits for `source`, once."""
        event = self.of.setdefault(source, self.first + len(self.of))
        if (event, op.stream) not in self.waited:
            self.waited.add((event, op.stream))
            before.append(OpRow(_make_control_signature(WAIT, event), (), (), op.module, op.stream))

    def record(self, editor: ProgramEditor) -> None:
        """Puts the events in place."""
        for scope in editor.scopes:
            ops: list[OpRow] = []
            for op in scope.ops:
                ops.append(op)
                if op in self.of:
                    ops.append(OpRow(_make_control_signature(RECORD, self.of[op]), (), (), op.module, op.stream))
            scope.ops = ops


def _make_control_signature(name: str, event: int) -> Signature:
    return Signature(name, (), (), (("event", event),))

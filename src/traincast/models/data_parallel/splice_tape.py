"""A tape that writes into a program which is there already, between its scopes and at their ends."""

from __future__ import annotations

from collections.abc import Iterable

from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import Phase, Signature, StorageKind
from traincast.ir.program import Program
from traincast.ir.splice import Splice
from traincast.models.layers.tape import Communicator, Tape


class SpliceBuilder(ProgramBuilder):
    """Builds onto a `Splice`: new scopes come before the old scope `before`, ops go to the end of scope `place`."""

    def __init__(self, splice: Splice) -> None:
        super().__init__(batch_size=splice.program.batch_size, seq_len=splice.program.seq_len)
        self.splice = splice
        self.before = self.place = 0

    def storage(self, nbytes: int, kind: StorageKind = StorageKind.ACTIVATION, *, before_step: bool = False) -> int:
        """A new storage of `nbytes` bytes, allocated by the next op unless it is there `before_step`."""
        return self.splice.storage(nbytes, kind, alloc=-1 if before_step else self.splice.next_op)

    def free(self, storage: int) -> None:
        """The storage was released after the last op added."""
        self.splice.storage_free[storage] = self.splice.last_op

    def tensor(self, storage: int) -> int:
        """A new tensor on this storage."""
        return self.splice.tensor(storage)

    def scope(self, name: str, phase: Phase, *, thread: int = 0, after: int = -1) -> int:
        """Opens a new top-level host op before the old scope `before`."""
        self.place = self.splice.scope(name, phase, before=self.before, thread=thread, after=after)
        return self.place

    def op(
        self, signature: Signature, inputs: Iterable[int], outputs: Iterable[int], *,
        module: str = "", forward: int = -1, stream: int = 0,
    ) -> int:  # fmt: skip
        """Adds an op at the end of scope `place`; ops of the old program are no forward ops of new ones."""
        assert forward == -1
        return self.splice.op(signature, inputs, outputs, scope=self.place, module=module, stream=stream)

    def build(self) -> Program:
        """The program with what is new in place."""
        return self.splice.build()


class SpliceTape(Tape):
    """Writes into `program`, in which `group` communicates on the stream it has there, or on the next free one."""

    builder: SpliceBuilder

    def __init__(self, program: Program, group: Communicator) -> None:
        super().__init__(program.batch_size, builder=SpliceBuilder(Splice(program)))
        self.splice = self.builder.splice
        self._streams[group.number] = _stream_of(program, group.number)
        self._events = 1 + last_event(program)

    def end_of(self, scope: int) -> None:
        """What follows goes to the end of a scope."""
        self.builder.place = scope

    def before(self, scope: int) -> None:
        """Scopes that follow are new ones before this one, on the thread of the one they come after."""
        self.builder.before = scope
        self.engine_thread = int(self.splice.program.columns.scope_thread[scope - 1]) if scope else 0


def _stream_of(program: Program, communicator: int) -> int:
    """The stream that the program runs this communicator on, or the next free one."""
    c = program.columns
    for index, signature in enumerate(program.signatures):
        if signature.scalar("communicator") == communicator:
            return int(c.op_stream[c.op_signature == index][0])
    return 1 + int(c.op_stream.max(initial=0))


def last_event(program: Program) -> int:
    """The highest number of an event in a program; -1 when there is none."""
    events = [signature.scalar("event") for signature in program.signatures]
    return max((event for event in events if isinstance(event, int)), default=-1)

"""A communicator of a program that is being spliced: collectives on its stream, tied to others by events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from traincast.workload.ops import Scalar, Signature, TensorSpec
from traincast.workload.program import Program
from traincast.workload.splice import Splice


@dataclass(frozen=True, slots=True)
class Place:
    """Where ops go: a scope, the stream they are issued to, the module they belong to."""

    scope: int
    stream: int = 0
    module: str = ""


@dataclass(slots=True, kw_only=True)
class Communicator:
    """Adds collectives as ProcessGroupNCCL runs them: the communicator's stream waits for the issuing one, and
    whoever uses the result waits for the communicator's."""

    splice: Splice
    ranks: tuple[int, ...]
    number: int
    stream: int = field(init=False)
    _next_event: int = field(init=False)

    def __post_init__(self) -> None:
        self.stream = _stream_of(self.splice.program, self.number)
        self._next_event = 1 + _last_event(self.splice.program)

    def collective(
        self,
        name: str,
        kind: str,
        tensor: int,
        spec: TensorSpec,
        place: Place,
        ends: Sequence[tuple[str, int]] = (),
    ) -> int:
        """Adds `c10d::name` on one buffer, asynchronous; gives the event that ends it."""
        started, done = self._event(), self._event()
        self.record(started, place)
        self.wait(started, Place(place.scope, self.stream, place.module))
        scalars: list[tuple[str, Scalar]] = [
            ("collective", kind), ("group", self.ranks), ("communicator", self.number), ("bytes", spec.nbytes),
            *ends, ("async_op", True),
        ]  # fmt: skip
        signature = Signature(f"c10d::{name}", (spec,), (spec,), tuple(scalars), (("tensors", 1),))
        self.splice.op(signature, [tensor], [tensor], scope=place.scope, module=place.module, stream=self.stream)
        self.record(done, Place(place.scope, self.stream, place.module))
        return done

    def record(self, event: int, place: Place) -> None:
        """The stream records an event."""
        self._control("cuda::event_record", event, place)

    def wait(self, event: int, place: Place) -> None:
        """The stream waits for an event."""
        self._control("cuda::stream_wait_event", event, place)

    def _control(self, name: str, event: int, place: Place) -> None:
        signature = Signature(name, (), (), (("event", event), ("stream", place.stream)))
        self.splice.op(signature, (), (), scope=place.scope, module=place.module, stream=place.stream)

    def _event(self) -> int:
        event, self._next_event = self._next_event, self._next_event + 1
        return event


def _stream_of(program: Program, communicator: int) -> int:
    """The stream that the program runs this communicator on, or the next free one."""
    c = program.columns
    for index, signature in enumerate(program.signatures):
        if signature.scalar("communicator") == communicator:
            return int(c.op_stream[c.op_signature == index][0])
    return 1 + int(c.op_stream.max(initial=0))


def _last_event(program: Program) -> int:
    events = [signature.scalar("event") for signature in program.signatures]
    return max((event for event in events if isinstance(event, int)), default=-1)

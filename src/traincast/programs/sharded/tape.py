"""A rank's tape: ops in host order as in `programs.tape`, and collectives as ProcessGroupNCCL runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from traincast.programs.sharded.marks import Mark, MarkedProgram, Role
from traincast.programs.tape import Arguments, Ref, Scalars, Tape
from traincast.workload.builder import ProgramBuilder
from traincast.workload.ops import Phase, StorageKind
from traincast.workload.program import Program
from traincast.workload.template import SizesBuilder


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group: its number and its global ranks in group order."""

    number: int
    ranks: tuple[int, ...]


class RankTape(Tape):
    """The tape of one rank. Each communicator has a stream of its own, numbered from 1 in order of first use.

    With `like`, a program of a rank that runs the same ops, only sizes are taken.
    """

    def __init__(self, batch_size: int, rank: int, world_size: int, gpus_per_node: int, like: Program | None) -> None:
        builder = ProgramBuilder(batch_size=batch_size, by_place=True) if like is None else SizesBuilder(like)
        super().__init__(batch_size, builder=builder)
        self.rank, self.world_size = rank, world_size
        self.world = Communicator(0, tuple(range(world_size)))
        node, local = divmod(rank, gpus_per_node)
        nodes = -(-world_size // gpus_per_node)
        mates = range(node * gpus_per_node, min((node + 1) * gpus_per_node, world_size))
        peers = range(local, world_size, gpus_per_node)
        # as `new_group` numbers them: a group a node, then a group of equal places in all nodes
        self.within = Communicator(1 + node, tuple(mates))
        self.across = Communicator(1 + nodes + local, tuple(peers))
        self._held: set[int] = set()
        self._streams: dict[int, int] = {}
        self._events = 0
        self._mark: Mark | None = None
        self._marks: list[Mark | None] = []

    @contextmanager
    def marked(self, role: Role, kind: str = "", batch: int = -1, number: int = 0) -> Iterator[None]:
        """Marks the scopes that are opened inside."""
        before, self._mark = self._mark, Mark(role, kind, batch, number)
        yield
        self._mark = before

    def marked_program(self) -> MarkedProgram:
        """The program written so far, with its marks."""
        return MarkedProgram(self.build(), tuple(self._marks))

    def scope(self, name: str, phase: Phase | None = None) -> None:
        """Opens a top-level host op, as `Tape.scope` does."""
        super().scope(name, phase)
        self._marks.append(self._mark)

    def engine_scope(self, name: str, phase: Phase) -> None:
        """Opens a top-level op on autograd's thread, which is in it already, whatever its phase."""
        self.builder.scope(name, phase, thread=1)
        self._marks.append(self._mark)

    def record(self, stream: int, *, module: str = "") -> int:
        """Records an event on a stream and gives its number."""
        event = self._events
        self._events += 1
        scalars = [("event", event), ("stream", stream)]
        self.op("cuda::event_record", [], [], scalars, module=module, stream=stream)
        return event

    def wait(self, event: int, stream: int = 0, *, module: str = "") -> None:
        """Lets a stream wait for an event."""
        scalars = [("event", event), ("stream", stream)]
        self.op("cuda::stream_wait_event", [], [], scalars, module=module, stream=stream)

    def collective(
        self,
        name: str,
        kind: str,
        group: Communicator,
        arguments: Arguments,
        output: Ref,
        *,
        nbytes: int,
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
        module: str = "",
        forward: int = -1,
    ) -> int:
        """A collective on its communicator's stream, after what the current one has; gives the event of its end."""
        stream = self._streams.setdefault(group.number, len(self._streams) + 1)
        around = "" if forward >= 0 else module
        self.wait(self.record(0, module=around), stream, module=around)
        uneven: Scalars = ()
        if splits is not None:
            uneven = (("send_splits", tuple(splits[0])), ("recv_splits", tuple(splits[1])))
        scalars: Scalars = [
            ("collective", kind), ("group", group.ranks), ("communicator", group.number), ("bytes", nbytes),
            *uneven, ("async_op", True),
        ]  # fmt: skip
        self.op(f"c10d::{name}", arguments, [output], scalars, module=module, forward=forward, stream=stream)
        return self.record(stream, module=around)

    def all_to_all(
        self, group: Communicator, given: Ref, output: Ref, send: Sequence[int], receive: Sequence[int],
        *, module: str = "", forward: int = -1,
    ) -> int:  # fmt: skip
        """An all-to-all of flat tensors; `send` and `receive` count the elements to and from each rank."""
        item = given.spec.itemsize
        sent, received = [item * n for n in send], [item * n for n in receive]
        even = len({*sent, *received}) == 1
        return self.collective(
            "alltoall_base_", "all_to_all" if even else "all_to_all_v", group, [("output", output), ("input", given)],
            output, nbytes=sum(sent), splits=None if even else (sent, received), module=module, forward=forward,
        )  # fmt: skip

    def copied_in(self, shape: tuple[int, ...], dtype: str) -> Ref:
        """An input copied from pinned host memory, without waiting for it. The training loop holds it to the end."""
        host = self.resident(shape, StorageKind.INPUT, dtype, "cpu:pinned")
        copied = self.new(shape, dtype)
        scalars: Scalars = [("dtype", None), ("non_blocking", True), ("memory_format", None)]
        self.op("aten::_to_copy", [("self", host)], [copied], scalars)
        self._held.add(copied.storage)
        return copied

    def free(self, *refs: Ref) -> None:
        """Releases storages after the last op so far, but not what the training loop holds."""
        super().free(*(ref for ref in refs if ref.storage not in self._held))

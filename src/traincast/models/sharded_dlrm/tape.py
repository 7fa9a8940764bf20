"""A rank's tape on which a sharded step is written: it keeps what each scope is there for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.models.layers.rank_tape import RankTape
from traincast.models.placement.kinds import ShardingKind
from traincast.models.sharded_dlrm.marks import Mark, MarkedProgram, Role


class MarkedTape(RankTape):
    """A `RankTape` whose scopes are marked."""

    def __init__(
        self, batch_size: int, rank: int, world_size: int, gpus_per_node: int, like: Program | None = None
    ) -> None:
        super().__init__(batch_size, rank, world_size, gpus_per_node, like)
        self._mark: Mark | None = None
        self._marks: list[Mark | None] = []

    @contextmanager
    def marked(self, role: Role, kind: ShardingKind | None = None, batch: int = -1, number: int = 0) -> Iterator[None]:
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
        """Opens a top-level op on autograd's thread, as `Tape.engine_scope` does."""
        super().engine_scope(name, phase)
        self._marks.append(self._mark)

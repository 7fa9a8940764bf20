"""Instructions of a rank whose kernels run on its host thread, written one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from traincast.costs.host.profile import ALONE
from traincast.simulator.schedule import Code, Schedule, count_resources
from traincast.utils.arrays import FloatArray

COMPUTING, GLOO = 0, 1
"""Streams: the core that computes (the one that captures call 0), and gloo, where ranks meet."""


@dataclass(slots=True)
class InstructionRows:
    """Rows of a schedule so far, with the host seconds of each. `collectives` are the instructions at which the rank
    joins its collectives, in order; `computes` those that `compute` wrote."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    computes: list[int] = field(default_factory=list)

    def add(
        self, code: Code, *, target: int = -1, event: int = -1, name: int = -1, call: int = -1, op: int = -1,
        scope: int = 0, seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """One instruction; `seconds` are what the host thread takes for it."""
        part = ALONE if code is Code.HOST else -1
        self.rows.append((code, 0, target, event, name, part, -1, call, op, scope))
        self.seconds.append(seconds)

    def compute(self, seconds: float) -> None:
        """Host work of this many seconds."""
        self.computes.append(len(self.rows))
        self.add(Code.HOST, seconds=seconds)

    def call(self, number: int, *, call: int = -1, op: int = -1, scope: int = 0) -> None:
        """The rank joins its collective `number` and goes on; event `number` is when all ranks have."""
        self.collectives.append(len(self.rows))
        self.add(Code.LAUNCH, target=GLOO, call=call, op=op, scope=scope)
        self.add(Code.EVENT_RECORD, target=GLOO, event=number, op=op, scope=scope)

    @property
    def host_seconds(self) -> FloatArray:
        """Host seconds of every instruction."""
        return np.array(self.seconds)

    def schedule(self) -> Schedule:
        """The instructions as columns."""
        return count_resources(np.array(self.rows, dtype=np.int32).reshape(-1, 10).T.copy())

"""What the host thread of a step does besides running kernels: events that are counted, and priced by a profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from traincast.costs.cpu.cpu_ops import VIEWS, make_cpu_ops
from traincast.ir.collectives import COLLECTIVE_OPS
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.utils.arrays import FloatArray

if TYPE_CHECKING:
    from traincast.costs.cpu.profile import Profile

HOST_EVENTS = ("step", "op", "view", "backward", "accumulate", "optimizer", "reduced", "collective")
"""A step, a top-level op outside backward, a view, an autograd node, a gradient that is accumulated, an op of the
optimizer; and of several ranks, a gradient that DDP has all-reduced, and a collective that is called."""


def count_host_events(program: Program) -> FloatArray:
    """How often each of `HOST_EVENTS` occurs in a step."""
    numbers = [event for event, _ in _list_events(program)]
    return np.bincount(numbers, minlength=len(HOST_EVENTS)).astype(np.float64)


def sum_host_seconds_by_op(program: Program, profile: Profile) -> FloatArray:
    """Seconds of the host before each op of a program; those of a top-level op stand before its first one."""
    prices = np.array([profile.host.get(name, 0.0) for name in HOST_EVENTS])
    events, places = np.array(list(_list_events(program)), dtype=np.int64).reshape(-1, 2).T
    last = max(program.num_ops - 1, 0)
    seconds = np.bincount(np.minimum(places, last), weights=prices[events], minlength=program.num_ops)
    return seconds.astype(np.float64)


def _list_events(program: Program) -> Iterator[tuple[int, int]]:
    """(event, op before which it happens) of a step."""
    number = {name: place for place, name in enumerate(HOST_EVENTS)}
    yield number["step"], 0
    for op in program.ops:
        if op.name in COLLECTIVE_OPS:
            yield number["collective"], op.index
        elif op.name in VIEWS:
            yield number["view"], op.index
        elif op.phase is Phase.OPTIMIZER or "Optimizer." in program.scopes[op.scope].name:
            yield from ((number["optimizer"], op.index) for _ in make_cpu_ops(op.signature))
    reduced = any(op.signature.scalar("collective") == "all_reduce" for op in program.ops)
    for scope in program.scopes:
        if scope.name.startswith("Optimizer."):
            continue
        if scope.phase is not Phase.BACKWARD:
            yield number["op"], scope.first_op
        elif "AccumulateGrad" in scope.name:
            yield number["accumulate"], scope.first_op
            if reduced:
                yield number["reduced"], scope.first_op
        else:
            yield number["backward"], scope.first_op

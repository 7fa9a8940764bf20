"""The ops of one program, each with its share of the host's time: what a step of several ranks is put together from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.costs.cpu.profile import Profile
from traincast.ir.program import Program
from traincast.simulator.cpu.step import deviation_seconds, host_seconds, priced_ops
from traincast.utils.arrays import FloatArray


@dataclass(frozen=True, eq=False, slots=True)
class OpCosts:
    """Seconds of every op of a program, and the standard deviation of their sum in seconds."""

    seconds: FloatArray
    deviation: float


def op_costs(program: Program, profile: Profile, access: Sequence[str] = (), *, ranks: int = 1) -> OpCosts:
    """Every op with an equal share of the host's time, while so many ranks compute; collectives and waits have nothing
    else. `access` as in `predict_serial`."""
    crowding = profile.crowding
    priced = [
        one._replace(seconds=one.seconds * crowding.factor(ranks, one.kind))
        for one in priced_ops(program, profile, access)
    ]
    host = host_seconds(program, profile)
    seconds = np.full(program.num_ops, host / max(program.num_ops, 1))
    for one in priced:
        seconds[one.op.index] += one.seconds
    return OpCosts(seconds, deviation_seconds(priced, host, profile))

"""The collectives of a program as one rank calls them: who takes part, and what is exchanged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias

import numpy as np

from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.lowered import LoweredProgram
from traincast.ir.collectives import COLLECTIVES, Route
from traincast.ir.ops import Scalar, Signature
from traincast.ir.program import Program
from traincast.ir.variants import BETWEEN_STAGES, UNIFORM, VARIANT
from traincast.simulator.schedule import Code, Schedule
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError

# Calls under one key meet in the order in which each rank makes them: a communicator of a group, or the messages that
# one rank sends another through it.
Key: TypeAlias = tuple[Scalar, tuple[int, ...], bool]


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveCall:
    """A collective as an op signature states it. Sizes in bytes, ranks global.

    `send` and `receive` are the bytes to and from every rank of the group, None where they are all equal. `root` is -1
    for collectives without one. `replicated`: it stands for that of every rank which runs the same programs.
    """

    kind: str
    compute: str
    key: Key
    bytes: int
    send: IntArray | None
    receive: IntArray | None
    root: int
    replicated: bool = False

    @property
    def group(self) -> tuple[int, ...]:
        """Ranks that take part: the group, or source and target of a message."""
        return self.key[1]


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveCalls:
    """All collective calls of a program in host order: the instruction that launches each, and what it exchanges."""

    instruction: IntArray
    exchange: tuple[CollectiveCall, ...]


class CollectiveFinder:
    """Finds the collectives of programs that were lowered together; what several share is described once."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self._calls, self._signatures = lowered.calls, lowered.signatures
        self._collective = np.array(
            [call.family is COLLECTIVE and UNIFORM not in call.variant.split() for call in lowered.calls],
            dtype=np.bool_,
        )
        self._known: dict[int, CollectiveCall] = {}
        self._keys: dict[Key, Key] = {}
        self._splits: dict[bytes, IntArray] = {}  # what one rank sends, all others may receive alike

    def calls(self, program: Program, schedule: Schedule, lowered: LoweredProgram) -> CollectiveCalls:
        """The collectives that a program launches (those of a group of one rank launch none)."""
        if not self._collective.any():
            return CollectiveCalls(np.empty(0, dtype=np.int64), ())
        launches = np.flatnonzero(schedule.code == Code.LAUNCH)
        chosen = launches[self._collective[schedule.call[launches]]]
        signatures = program.columns.op_signature[schedule.op[chosen]].tolist()
        calls = schedule.call[chosen].tolist()
        exchanges = [self._exchange(lowered.plain[s], c) for s, c in zip(signatures, calls, strict=True)]
        return CollectiveCalls(chosen, tuple(exchanges))

    def _exchange(self, number: int, call: int) -> CollectiveCall:
        if number not in self._known:
            exchange = read_collective(self._signatures[number], self._calls[call].compute)
            self._known[number] = replace(
                exchange,
                key=self._keys.setdefault(exchange.key, exchange.key),
                send=self._shared(exchange.send),
                receive=self._shared(exchange.receive),
            )
        return self._known[number]

    def _shared(self, splits: IntArray | None) -> IntArray | None:
        return None if splits is None else self._splits.setdefault(blake2b(splits.data).digest(), splits)


def read_collective(signature: Signature, compute: str) -> CollectiveCall:
    """What a collective op exchanges, from its scalars."""
    kind = signature.scalar("collective")
    assert isinstance(kind, str)
    group = _read_ranks(signature, signature.scalar("group"))
    communicator = signature.scalar("communicator", 0)
    record = COLLECTIVES[kind]
    message = record.route is Route.PAIR and signature.scalar("source") is not None
    if message:
        group = _read_ranks(signature, (signature.scalar("source"), signature.scalar("target")))
    root = signature.scalar("root", -1)
    send, receive = (_read_splits(signature, name, len(group)) for name in ("send_splits", "recv_splits"))
    if record.uneven_form_of and (send is None or receive is None):
        raise TraincastError(f"{signature.name}: an {kind} must say its send_splits and recv_splits")
    size = signature.scalar("bytes")
    assert isinstance(size, int)
    return CollectiveCall(
        kind=kind,
        compute=compute,
        key=(communicator, group, message),
        bytes=size,
        send=send,
        receive=receive,
        root=root if isinstance(root, int) else -1,
        replicated=signature.scalar(VARIANT) == BETWEEN_STAGES,
    )


def _read_ranks(signature: Signature, value: Scalar) -> tuple[int, ...]:
    problem = _find_group_problem(value)
    if problem:
        raise TraincastError(f"{signature.name} {problem}")
    return value  # type: ignore[return-value]


@lru_cache(maxsize=1024)  # a group of a thousand ranks is in as many programs
def _find_group_problem(value: Scalar) -> str:
    if not isinstance(value, tuple) or not all(isinstance(rank, int) and rank >= 0 for rank in value):
        return "does not name the ranks that take part; capture it again"
    if len(set(value)) != len(value):
        return f"names a rank of its group twice: {value}"
    return ""


def _read_splits(signature: Signature, name: str, ranks: int) -> IntArray | None:
    value = signature.scalar(name)
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) != ranks:
        raise TraincastError(f"{signature.name}: {name} must have one size for each of the {ranks} ranks of its group")
    return np.array(value, dtype=np.int64)

"""Collective calls of every rank, and which of them are one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias

import numpy as np

from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.lower import LoweredProgram
from traincast.ir.collectives import COLLECTIVES, Route
from traincast.ir.ops import BETWEEN_STAGES, UNIFORM, VARIANT, Scalar, Signature
from traincast.ir.program import Program
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


@dataclass(frozen=True, slots=True)
class Participant:
    """One program's part in a collective: its call number `call` (see `CollectiveCalls`)."""

    program: int
    call: int


@dataclass(frozen=True, eq=False, slots=True)
class MatchedCollective:
    """A collective as all its ranks see it; `exchanges` are what its participants say of it."""

    kind: str
    compute: str
    group: tuple[int, ...]
    participants: tuple[Participant, ...]
    exchanges: tuple[CollectiveCall, ...]


class Describe:
    """Names of ranks and calls for messages."""

    def __init__(self, ranks: Sequence[int], labels: Sequence[Sequence[str]]) -> None:
        self.ranks, self.labels = ranks, labels

    def who(self, program: int, does: str = "", where: str = "") -> str:
        """The ranks that run a program, as text, and what they do as in `rank_list`."""
        return format_rank_list([rank for rank, run in enumerate(self.ranks) if run == program], does, where)

    def call(self, program: int, call: int) -> str:
        """The op of a call, as text."""
        return self.labels[program][call]


def format_rank_list(ranks: Sequence[int], does: str = "", where: str = "") -> str:
    """Ranks as text, with where they are and a command: "rank 3 calls", "ranks 0 to 7", "ranks 0, 2, 5, 6 and 9 more".

    >>> rank_list([3], "wait", " at op 2"), rank_list([0, 2], "wait", " at op 2")
    ('rank 3 at op 2 waits', 'ranks 0, 2 at op 2 wait')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}{where}" + (f" {does}s" if does else "")
    text = ", ".join(str(rank) for rank in ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        text = f"{ranks[0]} to {ranks[-1]}"
    return f"ranks {text}{where}" + (f" {does}" if does else "")


def number_ranks(ranks: Sequence[int]) -> str:
    """The numbers of ranks alone, for a cell: `3`, `0 to 7`."""
    return format_rank_list(ranks).removeprefix("ranks ").removeprefix("rank ")


def match_calls(ranks: Sequence[int], calls: Sequence[CollectiveCalls], describe: Describe) -> list[MatchedCollective]:
    """The collectives of a step; `ranks[r]` is the program of rank r. Raises where ranks do not agree."""
    by_key: dict[Key, dict[int, list[int]]] = {}
    known: dict[int, dict[int, list[int]]] = {}  # by identity: to hash a group of a thousand ranks takes time
    for program, made in enumerate(calls):
        for call, exchange in enumerate(made.exchange):
            sequences = known.get(id(exchange.key))
            if sequences is None:
                sequences = known[id(exchange.key)] = by_key.setdefault(exchange.key, {})
            sequences.setdefault(program, []).append(call)
    program_of = np.array(ranks, dtype=np.int64)
    collectives = []
    for key, sequences in by_key.items():
        program, first = next(iter(sequences.items()))
        if not calls[program].exchange[first[0]].replicated:
            _check_members(key, sequences, program_of, describe)
        lengths = {program: len(sequence) for program, sequence in sequences.items()}
        _check_lengths(key, lengths, sequences, describe)
        for calls_of in zip(*sequences.values(), strict=True):
            participants = tuple(Participant(p, c) for p, c in zip(sequences, calls_of, strict=True))
            exchanges = tuple(calls[part.program].exchange[part.call] for part in participants)
            collectives.append(_join_participants(key, participants, exchanges, describe))
    return collectives


def _describe_call_key(key: Key) -> str:
    communicator, group, message = key
    if message:
        return f"messages from rank {group[0]} to rank {group[1]} (communicator {communicator})"
    return f"the group of {format_rank_list(group)} (communicator {communicator})"


def _check_members(key: Key, sequences: dict[int, list[int]], program_of: IntArray, describe: Describe) -> None:
    group = np.array(key[1], dtype=np.int64)
    program, calls = next(iter(sequences.items()))
    if group.max() >= len(program_of):
        raise TraincastError(
            f"{_describe_call_key(key)} includes rank {group.max()}, but there are {len(program_of)} ranks; "
            f"see {describe.who(program)} at {describe.call(program, calls[0])}"
        )
    calls_it = np.zeros(int(program_of.max()) + 1, dtype=np.bool_)
    calls_it[list(sequences)] = True
    absent = group[~calls_it[program_of[group]]]
    if len(absent):
        raise TraincastError(
            f"{format_rank_list(absent.tolist(), 'never take')} part in {_describe_call_key(key)}, where "
            f"{describe.who(program, 'wait', f' at {describe.call(program, calls[0])}')} for ever"
        )
    outside = calls_it[program_of]
    outside[group] = False
    strangers = np.flatnonzero(outside)
    if len(strangers):
        other = int(program_of[strangers[0]])
        raise TraincastError(
            f"{format_rank_list(strangers.tolist(), 'call')} {describe.call(other, sequences[other][0])} in "
            f"{_describe_call_key(key)}, "
            "without belonging to it"
        )


def _check_lengths(key: Key, lengths: dict[int, int], sequences: dict[int, list[int]], describe: Describe) -> None:
    fewest, most = min(lengths, key=lambda p: lengths[p]), max(lengths, key=lambda p: lengths[p])
    if lengths[fewest] != lengths[most]:
        waiting = describe.call(most, sequences[most][lengths[fewest]])
        raise TraincastError(
            f"{describe.who(most, 'make')} {lengths[most]} calls in {_describe_call_key(key)} but "
            f"{describe.who(fewest)} only "
            f"{lengths[fewest]}: {describe.who(most, 'wait')} for ever at {waiting}"
        )


def _join_participants(
    key: Key,
    participants: tuple[Participant, ...],
    exchanges: tuple[CollectiveCall, ...],
    describe: Describe,
) -> MatchedCollective:
    first = exchanges[0]
    all_to_all = COLLECTIVES[first.kind].route is Route.PEERS
    for participant, other in zip(participants[1:], exchanges[1:], strict=True):
        if other is first:
            continue
        difference = _describe_difference(first, other, all_to_all)
        if difference:
            calls = [
                f"{describe.who(p.program, 'call')} {describe.call(p.program, p.call)}"
                for p in (participants[0], participant)
            ]
            raise TraincastError(f"in {_describe_call_key(key)}, {' while '.join(calls)}: {difference}")
    uneven = (exchange.kind for exchange in exchanges if COLLECTIVES[exchange.kind].uneven_form_of)
    kind = next(uneven, first.kind)
    return MatchedCollective(kind, first.compute, key[1], participants, exchanges)


def _get_even_form(kind: str) -> str:
    return COLLECTIVES[kind].uneven_form_of or kind


def _describe_difference(one: CollectiveCall, other: CollectiveCall, all_to_all: bool) -> str:
    if _get_even_form(one.kind) != _get_even_form(other.kind):
        return f"{one.kind} meets {other.kind}; all ranks must call the same collectives in the same order"
    if one.root != other.root:
        return f"their roots are {one.root} and {other.root}"
    if one.bytes != other.bytes and not all_to_all:
        return f"their sizes are {one.bytes} and {other.bytes} bytes"
    return ""

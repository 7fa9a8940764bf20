"""Which calls of which programs are one collective, and whether those who meet agree on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.ir.collectives import COLLECTIVES, Route
from traincast.simulator.collective_calls import CollectiveCall, CollectiveCalls, Key
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError


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

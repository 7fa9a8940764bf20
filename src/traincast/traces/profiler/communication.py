"""Collectives with the bandwidth of their bus, and over ranks what of them was transfer and what was waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.costs.collectives.calls import get_bus_factor
from traincast.ir.collectives import COLLECTIVES
from traincast.traces.collectives import Collective, Matches

# those whose size is that of the whole, which other ranks have parts of before or after
_OF_THE_OUTPUT = ("all_gather",)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationRow:
    """Collectives of one kind, size and group on one rank; seconds. `ranks` is the size of the group (0 unknown).

    `bus` is bytes per second over the busiest link in the median call, waiting for other ranks included, and
    `bus_best` in the shortest one (None where size or group are not known)."""

    kind: str
    group: str
    ranks: int
    message_bytes: int
    count: int
    total: float
    median: float
    shortest: float
    bus: float | None
    bus_best: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCommunicationRow:
    """Matched collectives of one kind, size and group over ranks; seconds, means of one call.

    `transfer` is what the last rank took, `waiting` what the others waited for it on average, `longest` the most that
    one of them did. `last` is the rank that came last most often, `last_count` how often. `bus` is that of the
    transfer alone."""

    kind: str
    group: str
    ranks: int
    message_bytes: int
    count: int
    transfer: float
    waiting: float
    longest: float
    last: int
    last_count: int
    bus: float | None


def make_communication_rows(calls: Sequence[Collective], world_size: int | None) -> tuple[CommunicationRow, ...]:
    """The collectives of a rank, those with most time first."""
    groups: dict[tuple[str, str, int, int], list[float]] = {}
    for call in calls:
        if call.step >= 0:
            ranks = call.group_size or len(call.group_ranks) or world_size or 0
            groups.setdefault((call.kind, call.group, ranks, _count_bytes(call, ranks)), []).append(call.seconds)
    return tuple(
        CommunicationRow(
            kind=kind,
            group=group,
            ranks=ranks,
            message_bytes=size,
            count=len(seconds),
            total=sum(seconds),
            median=float(np.median(seconds)),
            shortest=min(seconds),
            bus=_compute_bus_bandwidth(kind, ranks, size, float(np.median(seconds))),
            bus_best=_compute_bus_bandwidth(kind, ranks, size, min(seconds)),
        )
        for (kind, group, ranks, size), seconds in sorted(groups.items(), key=lambda item: -sum(item[1]))
    )


def make_shared_communication_rows(matches: Matches, numbers: Sequence[int]) -> tuple[SharedCommunicationRow, ...]:
    """The collectives that ranks have in common, those with most time first; `numbers` are the ranks' own."""
    groups: dict[tuple[str, str, int, int], list[tuple[float, list[float], int]]] = {}
    for match in matches.collectives:
        ranks = match.calls[0].group_size or len(match.members)
        size = max(_count_bytes(call, ranks) for call in match.calls)
        seconds = [call.seconds for call in match.calls]
        waits = [s - match.seconds for s in seconds]
        last = numbers[match.members[int(np.argmin(seconds))]]
        groups.setdefault((match.kind, match.calls[0].group, ranks, size), []).append((match.seconds, waits, last))
    rows = [_make_shared_row(*key, found) for key, found in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.count * (row.transfer + row.waiting)))


def _make_shared_row(
    kind: str, group: str, ranks: int, size: int, found: list[tuple[float, list[float], int]]
) -> SharedCommunicationRow:
    last = [rank for _, _, rank in found]
    most = max(set(last), key=last.count)
    transfer = float(np.mean([seconds for seconds, _, _ in found]))
    return SharedCommunicationRow(
        kind=kind, group=group, ranks=ranks, message_bytes=size, count=len(found), transfer=transfer,
        waiting=float(np.mean([sum(waits) / max(len(waits) - 1, 1) for _, waits, _ in found])),
        longest=max(max(waits) for _, waits, _ in found), last=most, last_count=last.count(most),
        bus=_compute_bus_bandwidth(kind, ranks, size, transfer),
    )  # fmt: skip


def _count_bytes(call: Collective, ranks: int) -> int:
    """Bytes as nccl-tests counts them: of the larger buffer of a rank; -1 unknown."""
    if call.kind in _OF_THE_OUTPUT and call.message_bytes >= 0:
        return call.output_bytes if call.output_bytes >= 0 else call.message_bytes * max(ranks, 1)
    return call.message_bytes


def _compute_bus_bandwidth(kind: str, ranks: int, size: int, seconds: float) -> float | None:
    if kind not in COLLECTIVES or ranks < 2 or size < 0 or seconds <= 0:
        return None
    return size * get_bus_factor(kind, ranks) / seconds

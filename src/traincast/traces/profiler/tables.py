"""All tables of one rank's profile and their plain form; collectives with their bandwidths, device memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from traincast.costs.collectives.links import get_bus_factor
from traincast.ir.collectives import COLLECTIVES
from traincast.simulator.memory.allocator import SMALL_SIZE, CachingAllocator
from traincast.traces.collectives import Collective, Matches
from traincast.traces.counters import CounterRow, make_counter_rows
from traincast.traces.link import Linked
from traincast.traces.profiler.kernels import (
    GraphRow,
    KernelRow,
    LaunchRow,
    PlaceRow,
    QueuePoint,
    StreamRow,
    make_annotation_rows,
    make_graph_rows,
    make_kernel_rows,
    make_launch_rows,
    make_module_rows,
    make_queue_points,
    make_stream_rows,
)
from traincast.traces.profiler.rates import RateRow, make_rate_rows
from traincast.traces.signatures import SignatureReader
from traincast.traces.slowdowns import launch_queue
from traincast.utils.arrays import IntArray
from traincast.utils.results import Records

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


_MOST_POINTS = 1_000  # of a curve: the highest of as many stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """A step on one device, in bytes: allocated at its begin, at most and at its end; `reserved` at most (-1 unknown).

    Where the profiler did not record totals, they count from the begin of the trace (`relative`). `replayed` is what
    our allocator reserves at most, given the recorded allocations from the begin of the trace on and a cache as large
    as it was then; `apart` the largest difference of allocated bytes between the two (both -1: addresses or totals are
    unknown)."""

    number: int
    device: int
    begin: int
    peak: int
    end: int
    reserved: int
    allocations: int
    relative: bool
    replayed: int = -1
    apart: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Bytes allocated and reserved (-1 unknown) on a device, seconds after the first step began."""

    device: int
    seconds: float
    allocated: int
    reserved: int


@dataclass(frozen=True, eq=False)
class _Curve:
    """One device's memory after each allocation, by time."""

    device: int
    time: IntArray
    allocated: IntArray
    reserved: IntArray
    relative: bool
    bytes: IntArray
    address: IntArray


def make_memory_rows(linked: Linked) -> tuple[MemoryRow, ...]:
    """Every step on every device whose memory was recorded."""
    rows = []
    for curve in _make_curves(linked):
        replayed = None
        if not curve.relative:
            replayed = replay_recorded(curve.bytes, curve.address, curve.allocated, curve.reserved)
        for step in linked.steps:
            first, last = np.searchsorted(curve.time, [step.start, step.end]).tolist()
            if first == last:
                continue
            before = int(curve.allocated[first - 1]) if first else int(curve.allocated[first])
            rows.append(
                MemoryRow(
                    number=step.number, device=curve.device, begin=before,
                    peak=max(int(curve.allocated[first:last].max()), before), end=int(curve.allocated[last - 1]),
                    reserved=int(curve.reserved[first:last].max()), allocations=last - first, relative=curve.relative,
                    **({} if replayed is None else {
                        "replayed": int(replayed[1, first:last].max()),
                        "apart": int(abs(replayed[0, first:last] - curve.allocated[first:last]).max()),
                    }),
                )
            )  # fmt: skip
    return tuple(rows)


def replay_recorded(
    sizes: IntArray, addresses: IntArray, allocated: IntArray, reserved: IntArray
) -> IntArray | None:  # fmt: skip
    """Allocated and reserved bytes of our allocator after each recorded allocation (below 0: of a block given back),
    [2, allocations]. What is there before the first one is one block, and one for each that is given back later; what
    the cache held then is one free piece, for its pieces are not recorded."""
    if not len(sizes) or (addresses < 0).any():
        return None
    moves = list(zip(sizes.tolist(), addresses.tolist(), strict=True))
    seen, before = set[int](), dict[int, int]()
    for nbytes, address in moves:
        if nbytes > 0:
            seen.add(address)
        elif address not in seen:
            before.setdefault(address, -nbytes)
    allocator = CachingAllocator()
    rest = int(allocated[0]) - moves[0][0] - sum(before.values())
    if rest > 0:
        allocator.allocate(rest)
    held = {address: allocator.allocate(nbytes) for address, nbytes in before.items()}
    cached = int(reserved[0]) - allocator.reserved
    if cached > SMALL_SIZE:
        allocator.free(allocator.allocate(cached))
    found = np.empty((2, len(moves)), dtype=np.int64)
    for number, (nbytes, address) in enumerate(moves):
        if address in held:
            allocator.free(held.pop(address))
        if nbytes > 0:
            held[address] = allocator.allocate(nbytes)
        found[:, number] = allocator.allocated, allocator.reserved
    return found


def make_memory_points(linked: Linked) -> tuple[MemoryPoint, ...]:
    """The curve of every device; a long one by the highest point of each of a thousand stretches."""
    points = []
    for curve in _make_curves(linked):
        for chosen in np.array_split(np.arange(len(curve.time)), min(_MOST_POINTS, len(curve.time))):
            at = int(chosen[int(np.argmax(curve.allocated[chosen]))])
            seconds = 1e-9 * float(curve.time[at] - linked.steps[0].start)
            points.append(
                MemoryPoint(
                    device=curve.device, seconds=seconds, allocated=int(curve.allocated[at]),
                    reserved=int(curve.reserved[at]),
                )
            )  # fmt: skip
    return tuple(points)


def _make_curves(linked: Linked) -> list[_Curve]:
    memory = linked.trace.memory
    curves = []
    for device in np.unique(memory["device"]).tolist():
        rows = memory[memory["device"] == device]
        rows = rows[np.argsort(rows["time"], kind="stable")]
        relative = bool((rows["allocated"] < 0).any())
        allocated = np.cumsum(rows["bytes"]) if relative else rows["allocated"]
        curves.append(
            _Curve(device, rows["time"], allocated, rows["reserved"], relative, rows["bytes"], rows["address"])
        )
    return curves


# names of fields -> of columns, with the unit that a plain form says, and the factor to it
_UNITS = {
    "total": ("total_ms", 1e3), "mean": ("mean_us", 1e6), "shortest": ("shortest_us", 1e6),
    "longest": ("longest_us", 1e6), "host": ("host_ms", 1e3), "device": ("device_ms", 1e3), "own": ("own_ms", 1e3),
    "delay_median": ("delay_median_us", 1e6), "delay_p95": ("delay_p95_us", 1e6),
    "short_seconds": ("short_ms", 1e3), "span": ("span_ms", 1e3), "idle": ("idle_ms", 1e3),
    "median": ("median_us", 1e6), "transfer": ("transfer_us", 1e6), "waiting": ("waiting_us", 1e6),
    "bus": ("bus_gbs", 1e-9), "bus_best": ("bus_best_gbs", 1e-9), "seconds": ("ms", 1e3),
    "begin": ("begin_bytes", 1), "peak": ("peak_bytes", 1), "end": ("end_bytes", 1),
    "replayed": ("replayed_bytes", 1), "apart": ("apart_bytes", 1),
    "reserved": ("reserved_bytes", 1), "allocated": ("allocated_bytes", 1), "gap_longest": ("gap_longest_us", 1e6),
    "bytes_per_second": ("gbs", 1e-9),
}  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class ProfileTables:
    """What a profiler's page shows of one rank; seconds and bytes. The tables are of all steps together."""

    kernels: tuple[KernelRow, ...]
    rates: tuple[RateRow, ...]
    modules: tuple[PlaceRow, ...]
    annotations: tuple[PlaceRow, ...]
    exchanges: tuple[CommunicationRow, ...]
    launches: tuple[LaunchRow, ...]
    graphs: tuple[GraphRow, ...]
    memory: tuple[MemoryRow, ...]
    memory_curve: tuple[MemoryPoint, ...]
    streams: tuple[StreamRow, ...]
    queue_curve: tuple[QueuePoint, ...]
    counters: tuple[CounterRow, ...]

    def to_dict(self) -> Records:
        """The tables as plain rows; columns say their units."""
        rates = [
            {**_convert_row(row), "tflops": row.tflops, "tbytes": row.tbytes} for row in self.rates
        ]  # derived, so not among the fields
        return {
            "top_kernels": convert_rows(self.kernels),
            "rates": rates,
            "modules": convert_rows(self.modules),
            "annotations": convert_rows(self.annotations),
            "exchanges": convert_rows(self.exchanges),
            "launches": convert_rows(self.launches),
            "graphs": convert_rows(self.graphs),
            "memory": convert_rows(self.memory),
            "memory_curve": convert_rows(self.memory_curve),
            "streams": convert_rows(self.streams),
            "queue_curve": convert_rows(self.queue_curve),
            "counters": [row.to_dict() for row in self.counters],
        }


def profile_tables(linked: Linked, reader: SignatureReader, calls: Sequence[Collective]) -> ProfileTables:
    """Everything of one rank."""
    queue = launch_queue(linked)
    return ProfileTables(
        kernels=make_kernel_rows(linked),
        rates=make_rate_rows(linked, reader),
        modules=make_module_rows(linked),
        annotations=make_annotation_rows(linked),
        exchanges=make_communication_rows(calls, linked.trace.world_size),
        launches=make_launch_rows(linked, queue),
        graphs=make_graph_rows(linked),
        memory=make_memory_rows(linked),
        memory_curve=make_memory_points(linked),
        streams=make_stream_rows(linked),
        queue_curve=make_queue_points(linked, queue),
        counters=make_counter_rows(linked),
    )


def convert_rows(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of any of the tables with columns that say their units."""
    return [_convert_row(row) for row in rows]


def _convert_row(row: KernelRow | RateRow | PlaceRow | SharedCommunicationRow) -> dict[str, Any]:
    plain = {}
    for part in fields(row):
        name, value = part.name, getattr(row, part.name)
        column, factor = _UNITS.get(name, (name, 1))
        if part.type == "int" and factor != 1:  # the number of a device, not its seconds; launches that wait
            column, factor = name, 1
        if column == "longest_us" and isinstance(row, SharedCommunicationRow):
            column = "longest_wait_us"
        plain[column] = value if value is None or factor == 1 else factor * value
    return plain

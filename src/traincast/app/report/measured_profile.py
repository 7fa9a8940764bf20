"""The tables of a profiler's page: cells for text and pages alike, and their text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from traincast.traces.profiler.kernels import PlaceRow
from traincast.traces.profiler.tables import ProfileTables, SharedCommunicationRow
from traincast.traces.replay.results import RankReport
from traincast.utils.display.text import format_milliseconds, format_quantity, format_table, shorten_name

_FEW = 2  # counters of a row; the JSON has all
_NAME = 60  # letters of a name: what follows are template arguments
_PLAIN = re.compile(r"^void |\bat::native::|\(anonymous namespace\)::|\bat::detail::")  # tells no two kernels apart


@dataclass(frozen=True, slots=True)
class ProfileTable:
    """The first rows of one table as they are shown; `count` is that of all of its rows, and columns in `right` are
    numbers."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    count: int
    right: Iterable[int]
    note: str = ""

    @property
    def left_out(self) -> str:
        """Where the rows are that are not shown; nothing if all are."""
        rest = self.count - len(self.rows)
        return f"{rest} more rows in the JSON" if rest else ""


def format_profile(rank: RankReport, top: int) -> list[str]:
    """Every table that has rows, each with at most `top` of them; times are of one step."""
    lines = []
    for shown in make_profile_tables(rank, top):
        rest = (f"  {line}" for line in (shown.note, shown.left_out) if line)
        lines += ["", shown.title, _format_table(shown), *rest]
    return lines


def _format_table(shown: ProfileTable) -> str:
    return format_table(shown.header, shown.rows, right=tuple(shown.right))


def make_profile_tables(rank: RankReport, top: int) -> list[ProfileTable]:
    """The tables of one rank that have rows, each with at most `top` of them; times are of one step."""
    profile, steps = rank.profile, len(rank.steps)
    tables = [
        _make_kernels(profile, steps, top),
        _make_rates(profile, steps, top),
        _make_counters(profile, top),
        _make_places("By module (forward)", profile.modules, steps, top),
        _make_places("By annotation", profile.annotations, steps, top),
        _make_graphs(profile, steps, top),
        _make_launches(profile, top),
        _make_streams(profile, steps, top),
        _make_memory(profile, top),
    ]
    return [shown for shown in tables if shown.count]


def _make_kernels(profile: ProfileTables, steps: int, top: int) -> ProfileTable:
    rows = [
        (
            shorten_name(_PLAIN.sub("", k.name), _NAME),
            k.family,
            _format_count(k.count / steps),
            f"{1e6 * k.mean:.1f}",
            format_milliseconds(k.total / steps),
            f"{k.share:.1%}",
        )
        for k in profile.kernels[:top]
    ]
    header = ("kernel", "family", "count", "mean us", "ms", "share")
    return ProfileTable("Kernels with most time (per step)", header, rows, len(profile.kernels), range(2, 6))


def _make_streams(profile: ProfileTables, steps: int, top: int) -> ProfileTable:
    rows = [
        (
            f"{r.device}/{r.stream}", f"{r.kernels / steps:.0f}", format_milliseconds(r.total / steps),
            format_milliseconds(r.idle / steps), format_milliseconds(r.gap_longest),
            f"{1e-9 * r.bytes_per_second:.1f}" if r.bytes else "-",
        )
        for r in (profile.streams[:top] if len(profile.streams) > 1 else ())
    ]  # fmt: skip
    header = ("device/stream", "kernels", "busy ms", "idle ms", "longest gap ms", "copies GB/s")
    return ProfileTable("By stream", header, rows, len(profile.streams) if rows else 0, range(1, 6))


def _make_rates(profile: ProfileTables, steps: int, top: int) -> ProfileTable:
    rows = [
        (shorten_name(r.op, 32), shorten_name(r.shapes, 40), r.compute, _format_count(r.count / steps),
         f"{1e6 * r.mean:.1f}", format_milliseconds(r.total / steps), f"{r.tflops:.1f}" if r.flops else "",
         _format_percent(r.of_flops),
         f"{r.tbytes:.2f}", _format_percent(r.of_bandwidth))
        for r in profile.rates[:top]
    ]  # fmt: skip
    header = ("op", "shapes", "in", "count", "mean us", "ms", "TFLOP/s", "of peak", "TB/s", "of peak")
    over = any(max(r.of_flops or 0.0, r.of_bandwidth or 0.0) > 1.0 for r in profile.rates[:top])
    note = "more than 100 %: an algorithm with fewer operations (Winograd), or bytes that a cache holds" if over else ""
    return ProfileTable("Rates by op and shape", header, rows, len(profile.rates), range(3, 10), note)


def _make_counters(profile: ProfileTables, top: int) -> ProfileTable:
    rows = [
        (shorten_name(r.op, 32), shorten_name(_PLAIN.sub("", r.kernel), _NAME), str(r.count),
         "" if r.flops is None else f"{1e-9 * r.flops:.4g}",
         ", ".join(f"{name} {value:.4g}" for name, value in list(r.values.items())[:_FEW]))
        for r in profile.counters[:top]
    ]  # fmt: skip
    header = ("op", "kernel", "count", "GFLOP", "counters")
    return ProfileTable("Hardware counters", header, rows, len(profile.counters), range(2, 4), "all steps together")


def _format_count(number: float) -> str:
    """Counts of a step need not be integers where steps differ: one digit is enough."""
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


def _format_percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _make_places(title: str, rows: Sequence[PlaceRow], steps: int, top: int) -> ProfileTable:
    cells = [
        (
            shorten_name(r.name, _NAME),
            _format_count(r.count / steps),
            format_milliseconds(r.host / steps),
            _format_count(r.kernels / steps),
            format_milliseconds(r.device / steps),
            format_milliseconds(r.own / steps),
        )
        for r in rows[:top]
    ]
    header = ("name", "count", "host ms", "kernels", "device ms", "itself ms")
    return ProfileTable(title, header, cells, len(rows), range(1, 6))


def _make_graphs(profile: ProfileTables, steps: int, top: int) -> ProfileTable:
    rows = [
        (shorten_name(g.name, _NAME), _format_count(g.launches / steps), str(g.nodes),
         *(format_milliseconds(seconds / steps) for seconds in (g.device, g.span, g.idle)))
        for g in profile.graphs[:top]
    ]  # fmt: skip
    header = ("graph", "launches", "nodes", "device ms", "from begin to end ms", "idle between nodes ms")
    return ProfileTable("Graphs", header, rows, len(profile.graphs), range(1, 6))


def _make_launches(profile: ProfileTables, top: int) -> ProfileTable:
    rows = [
        (str(r.number), str(r.calls), f"{r.waiting_mean:.0f}", str(r.waiting_most), str(r.held),
         f"{1e6 * r.delay_median:.0f}", f"{1e6 * r.delay_p95:.0f}", f"{r.short}", format_milliseconds(r.short_seconds))
        for r in profile.launches[:top]
    ]  # fmt: skip
    header = (
        "step", "calls", "waiting before", "at most", "held by a full queue", "delay us", "95 % below us",
        "kernels < 10 us", "their ms",
    )  # fmt: skip
    title = "Launches: from the call to its kernel"
    return ProfileTable(title, header, rows, len(profile.launches), range(9))


def _make_memory(profile: ProfileTables, top: int) -> ProfileTable:
    rows = [
        (str(r.number), str(r.device), _format_bytes(r.begin), _format_bytes(r.peak), _format_bytes(r.end),
         *(_format_bytes(nbytes) if nbytes >= 0 else "?" for nbytes in (r.reserved, r.replayed)), f"{r.allocations:,}")
        for r in profile.memory[:top]
    ]  # fmt: skip
    header = ("step", "device", "at begin", "peak", "at end", "reserved", "replayed", "allocations")
    relative = any(row.relative for row in profile.memory)
    note = "totals were not recorded: bytes count from the begin of the trace" if relative else ""
    if any(row.replayed >= 0 for row in profile.memory):
        note = "replayed: PyTorch's allocator, given these allocations and a cache that is one piece when they begin"
    return ProfileTable("Device memory", header, rows, len(profile.memory), range(8), note)


def _format_bytes(number: int) -> str:
    return format_quantity(number, "B") if number >= 0 else f"-{format_quantity(-number, 'B')}"


def format_communication(rank: RankReport, top: int) -> str:
    """The collectives of a rank with the bandwidth of their bus."""
    return _format_table(make_communication_cells(rank, top))


def format_shared_communication(exchanges: Sequence[SharedCommunicationRow], top: int) -> str:
    """Collectives over ranks: transfer, and waiting for the rank that came last."""
    return _format_table(make_shared_communication_cells(exchanges, top))


def make_communication_cells(rank: RankReport, top: int) -> ProfileTable:
    """The collectives of a rank with the bandwidth of their bus, waiting for other ranks included."""
    rows = [
        (
            r.kind,
            f"{r.message_bytes:,}" if r.message_bytes >= 0 else "?",
            r.group[:_NAME] or "-",
            str(r.ranks or "?"),
            str(r.count),
            format_milliseconds(r.median),
            _format_rate(r.bus),
            format_milliseconds(r.shortest),
            _format_rate(r.bus_best),
        )
        for r in rank.profile.exchanges[:top]
    ]
    header = ("collective", "bytes", "group", "ranks", "count", "median ms", "bus GB/s", "shortest ms", "bus GB/s")
    right = (1, *range(3, 9))
    return ProfileTable("Collectives of one rank", header, rows, len(rank.profile.exchanges), right)


def make_shared_communication_cells(exchanges: Sequence[SharedCommunicationRow], top: int) -> ProfileTable:
    """Collectives over ranks: transfer, and waiting for the rank that came last."""
    rows = [
        (
            r.kind,
            f"{r.message_bytes:,}" if r.message_bytes >= 0 else "?",
            r.group[:_NAME] or "-",
            str(r.ranks),
            str(r.count),
            format_milliseconds(r.transfer),
            _format_rate(r.bus),
            format_milliseconds(r.waiting),
            format_milliseconds(r.longest),
            f"rank {r.last} ({r.last_count} of {r.count})",
        )
        for r in exchanges[:top]
    ]
    header = (
        "collective", "bytes", "group", "ranks", "count", "transfer ms", "bus GB/s", "others waited ms", "at most ms",
        "came last",
    )  # fmt: skip
    return ProfileTable("Collectives over ranks (means of one call)", header, rows, len(exchanges), range(1, 9))


def _format_rate(bytes_per_second: float | None) -> str:
    return "" if bytes_per_second is None else f"{1e-9 * bytes_per_second:.1f}"

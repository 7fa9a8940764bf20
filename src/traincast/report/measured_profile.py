"""The tables of a profiler's page as text."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.display.text import in_units, milliseconds, table
from traincast.profiler.exchanges import SharedExchangeRow
from traincast.profiler.places import PlaceRow
from traincast.profiler.tables import ProfileTables
from traincast.replay.results import RankReport

_NAME = 60  # letters of a name: what follows are template arguments


def profile_text(rank: RankReport, top: int) -> list[str]:
    """Every table that has rows, each with at most `top` of them; times are of one step."""
    profile, steps = rank.profile, len(rank.steps)
    parts = [
        _section("Kernels with most time (a step)", _kernels(profile, steps, top), len(profile.kernels), top),
        _section("Rates by op and shape", _rates(profile, steps, top), len(profile.rates), top),
        _section("By module (forward)", _places(profile.modules, steps, top), len(profile.modules), top),
        _section("By annotation", _places(profile.annotations, steps, top), len(profile.annotations), top),
        _section("Graphs", _graphs(profile, steps, top), len(profile.graphs), top),
        _section("Launches: from the call to its kernel", _launches(profile, top), len(profile.launches), top),
        _section("Device memory", _memory(profile, top), len(profile.memory), top),
    ]
    return [line for part in parts for line in part]


def _section(title: str, text: str, count: int, top: int) -> list[str]:
    if not count:
        return []
    more = [f"  {count - top} more in the JSON"] if count > top else []
    return ["", title, text, *more]


def _kernels(profile: ProfileTables, steps: int, top: int) -> str:
    rows = [
        (k.name[:_NAME], k.family, f"{k.count / steps:g}", f"{1e6 * k.mean:.1f}", milliseconds(k.total / steps),
         f"{k.share:.1%}")
        for k in profile.kernels[:top]
    ]  # fmt: skip
    return table(("kernel", "family", "count", "mean us", "ms", "share"), _rounded(rows, 2), right=(2, 3, 4, 5))


def _rounded(rows: Sequence[tuple[str, ...]], column: int) -> list[tuple[str, ...]]:
    """Counts of a step need not be whole numbers where steps differ: one digit is enough."""
    return [(*row[:column], f"{float(row[column]):.3g}", *row[column + 1 :]) for row in rows]


def _rates(profile: ProfileTables, steps: int, top: int) -> str:
    rows = [
        (r.op[:32], r.shapes[:40], r.compute, f"{r.count / steps:.3g}", f"{1e6 * r.mean:.1f}",
         milliseconds(r.total / steps), f"{r.tflops:.1f}" if r.flops else "", _percent(r.of_flops),
         f"{r.tbytes:.2f}", _percent(r.of_bandwidth))
        for r in profile.rates[:top]
    ]  # fmt: skip
    header = ("op", "shapes", "in", "count", "mean us", "ms", "TFLOP/s", "of peak", "TB/s", "of peak")
    return table(header, rows, right=range(3, 10))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _places(rows: Sequence[PlaceRow], steps: int, top: int) -> str:
    cells = [
        (r.name[:_NAME], f"{r.count / steps:.3g}", milliseconds(r.host / steps), f"{r.kernels / steps:.4g}",
         milliseconds(r.device / steps), milliseconds(r.own / steps))
        for r in rows[:top]
    ]  # fmt: skip
    return table(("name", "count", "host ms", "kernels", "device ms", "itself ms"), cells, right=range(1, 6))


def _graphs(profile: ProfileTables, steps: int, top: int) -> str:
    rows = [
        (g.name[:_NAME], f"{g.launches / steps:.3g}", str(g.nodes), milliseconds(g.device / steps),
         milliseconds(g.span / steps), milliseconds(g.idle / steps))
        for g in profile.graphs[:top]
    ]  # fmt: skip
    header = ("graph", "launches", "nodes", "device ms", "from begin to end ms", "idle between nodes ms")
    return table(header, rows, right=range(1, 6))


def _launches(profile: ProfileTables, top: int) -> str:
    rows = [
        (str(r.number), str(r.calls), f"{r.waiting_mean:.0f}", str(r.waiting_most), str(r.held),
         f"{1e6 * r.delay_median:.0f}", f"{1e6 * r.delay_p95:.0f}", f"{r.short}", milliseconds(r.short_seconds))
        for r in profile.launches[:top]
    ]  # fmt: skip
    header = (
        "step", "calls", "waiting before", "at most", "held by a full queue", "delay us", "95 % below us",
        "kernels < 10 us", "their ms",
    )  # fmt: skip
    return table(header, rows, right=range(9))


def _memory(profile: ProfileTables, top: int) -> str:
    rows = [
        (str(r.number), str(r.device), _bytes(r.begin), _bytes(r.peak), _bytes(r.end),
         _bytes(r.reserved) if r.reserved >= 0 else "?", f"{r.allocations:,}")
        for r in profile.memory[:top]
    ]  # fmt: skip
    header = ("step", "device", "at begin", "peak", "at end", "reserved", "allocations")
    relative = any(row.relative for row in profile.memory)
    note = "\n  totals were not recorded: bytes count from the begin of the trace" if relative else ""
    return table(header, rows, right=range(7)) + note


def _bytes(number: int) -> str:
    return in_units(number, "B") if number >= 0 else f"-{in_units(-number, 'B')}"


def exchanges_text(rank: RankReport, top: int) -> str:
    """The collectives of a rank with the bandwidth of their bus."""
    rows = [
        (r.kind, f"{r.message_bytes:,}" if r.message_bytes >= 0 else "?", r.group or "-", str(r.ranks or "?"),
         str(r.count), milliseconds(r.median), _rate(r.bus), milliseconds(r.shortest), _rate(r.bus_best))
        for r in rank.profile.exchanges[:top]
    ]  # fmt: skip
    header = ("collective", "bytes", "group", "ranks", "count", "median ms", "bus GB/s", "shortest ms", "bus GB/s")
    return table(header, rows, right=(1, 3, 4, 5, 6, 7, 8))


def shared_exchanges_text(exchanges: Sequence[SharedExchangeRow], top: int) -> str:
    """Collectives over ranks: transfer, and waiting for the rank that came last."""
    rows = [
        (r.kind, f"{r.message_bytes:,}" if r.message_bytes >= 0 else "?", r.group or "-", str(r.ranks), str(r.count),
         milliseconds(r.transfer), _rate(r.bus), milliseconds(r.waiting), milliseconds(r.longest),
         f"rank {r.last} ({r.last_count} of {r.count})")
        for r in exchanges[:top]
    ]  # fmt: skip
    header = (
        "collective", "bytes", "group", "ranks", "count", "transfer ms", "bus GB/s", "others waited ms", "at most ms",
        "came last",
    )  # fmt: skip
    return table(header, rows, right=range(1, 9))


def _rate(bytes_per_second: float | None) -> str:
    return "" if bytes_per_second is None else f"{1e-9 * bytes_per_second:.1f}"

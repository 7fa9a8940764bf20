"""All tables of one rank's profile, and their plain form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from traincast.traces.collectives import Collective
from traincast.traces.launch_queue import launch_queue
from traincast.traces.link import Linked
from traincast.traces.profiler.communication import CommunicationRow, SharedCommunicationRow, make_communication_rows
from traincast.traces.profiler.kernels import (
    GraphRow,
    KernelRow,
    LaunchRow,
    QueuePoint,
    StreamRow,
    make_graph_rows,
    make_kernel_rows,
    make_launch_rows,
    make_queue_points,
    make_stream_rows,
)
from traincast.traces.profiler.memory import MemoryPoint, MemoryRow, make_memory_points, make_memory_rows
from traincast.traces.profiler.places import PlaceRow, make_annotation_rows, make_module_rows
from traincast.traces.profiler.rates import RateRow, make_rate_rows
from traincast.traces.signatures import SignatureReader
from traincast.utils.results import Records

# names of fields -> of columns, with the unit that a plain form says, and the factor to it
_UNITS = {
    "total": ("total_ms", 1e3), "mean": ("mean_us", 1e6), "shortest": ("shortest_us", 1e6),
    "longest": ("longest_us", 1e6), "host": ("host_ms", 1e3), "device": ("device_ms", 1e3), "own": ("own_ms", 1e3),
    "delay_median": ("delay_median_us", 1e6), "delay_p95": ("delay_p95_us", 1e6),
    "short_seconds": ("short_ms", 1e3), "span": ("span_ms", 1e3), "idle": ("idle_ms", 1e3),
    "median": ("median_us", 1e6), "transfer": ("transfer_us", 1e6), "waiting": ("waiting_us", 1e6),
    "bus": ("bus_gbs", 1e-9), "bus_best": ("bus_best_gbs", 1e-9), "seconds": ("ms", 1e3),
    "begin": ("begin_bytes", 1), "peak": ("peak_bytes", 1), "end": ("end_bytes", 1),
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
    )


def convert_rows(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of any of the tables with columns that say their units."""
    return [_convert_row(row) for row in rows]


def _convert_row(row: KernelRow | RateRow | PlaceRow | SharedCommunicationRow) -> dict[str, Any]:
    plain = {}
    for name, value in asdict(row).items():
        column, factor = _UNITS.get(name, (name, 1))
        if column == "longest_us" and isinstance(row, SharedCommunicationRow):
            column = "longest_wait_us"
        plain[column] = value if value is None or factor == 1 else factor * value
    return plain

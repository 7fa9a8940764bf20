"""Kineto (Chrome JSON) traces: `.json` or `.json.gz`, old and new dialects, NVIDIA and AMD; events written oddly or
twice."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from traincast.hardware.platform import find_driver_name
from traincast.traces.counters import CATEGORY, CounterReader
from traincast.traces.events import (
    CATEGORIES,
    DEVICE_KINDS,
    EVENT,
    GRAPH_SHIFT,
    LIMIT,
    MEMORY,
    MOMENT,
    UNREADABLE,
    Int,
    Interner,
    Kind,
    RowSink,
    Table,
    TableBuilder,
    TimelineTrace,
    make_blank_events,
)
from traincast.traces.scan import scan_file
from traincast.utils.arrays import IndexArray
from traincast.utils.errors import escape_text

Time = Int | Annotated[float, msgspec.Meta(ge=-4e18, le=4e18)]
_NOT_JSON = re.compile(rb"([:\[,]\s*)[-+]?(?:nan|inf|infinity)(?=\s*[,}\]])", re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?!["\\/bfnrtu])')
_AT_END = re.compile(r"0x[0-9a-f]{1,15}$|[0-9]{1,18}$", re.IGNORECASE)
_RAW = msgspec.Raw(b"")


class Arguments(msgspec.Struct, gc=False, rename={
    "external": "External id", "external_old": "external id", "dims": "Input Dims", "types": "Input type",
    "concrete": "Concrete Inputs", "sequence": "Sequence number", "forward_thread": "Fwd thread id",
    "record_function": "Record function id", "waits_for": "wait_on_cuda_event_record_corr_id",
    "collective": "Collective name", "in_elements": "In msg nelems", "out_elements": "Out msg nelems",
    "in_split": "In split size", "out_split": "Out split size", "group": "Process Group Name",
    "group_ranks": "Process Group Ranks", "group_size": "Group size",
    "stack": "Call stack", "strides": "Input Strides", "allocation": "Bytes", "allocated": "Total Allocated",
    "reserved": "Total Reserved", "address": "Addr", "device_type": "Device Type", "device_id": "Device Id",
    "registers": "registers per thread", "shared": "shared memory", "order": "Seq", "comms_id": "Comms Id",
    "graph": "graph id", "node": "graph node id",
}):  # fmt: skip
    """The arguments of an event that matter; everything else is skipped without being built."""

    external: Int = -1
    external_old: Int = -1
    correlation: Int = -1
    stream: Int | str = -1  # AMD's launch calls name a handle, "0x0" for the default stream
    device: Int = -1
    bytes: Any = -1
    sequence: Int = -1
    forward_thread: Int = 0
    record_function: Int = -1
    waits_for: Int = -1
    graph: Int = 0
    node: Int = -1
    dims: msgspec.Raw = _RAW
    types: msgspec.Raw = _RAW
    strides: msgspec.Raw = _RAW
    concrete: msgspec.Raw = _RAW
    collective: str = ""
    dtype: Any = ""
    in_elements: Any = 0
    out_elements: Any = 0
    in_split: Any = ""
    out_split: Any = ""
    group: Any = ""
    group_ranks: Any = ""
    group_size: Any = 0
    stack: msgspec.Raw = _RAW
    allocation: Any = 0
    allocated: Any = -1
    reserved: Any = -1
    address: Any = -1
    device_type: Any = -1
    device_id: Any = 0
    order: Any = -1
    comms_id: Any = ""
    grid: msgspec.Raw = _RAW
    block: msgspec.Raw = _RAW
    registers: msgspec.Raw = _RAW
    shared: msgspec.Raw = _RAW


class Event(msgspec.Struct, gc=False):
    """One trace event."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    pid: Int | str = 0
    tid: Int | str = 0
    ts: Time = 0
    dur: Time = -1  # not recorded: such an event makes no sense
    args: Arguments | None = None


_BATCH = msgspec.json.Decoder(list[Event])
_LENIENT = msgspec.json.Decoder(Event, strict=False)
_FIELDS = msgspec.structs.fields(Arguments)


def decode_batch(raw: bytes) -> list[Event]:
    """The events of a JSON array, all of them as profilers write them; nan and inf, which some do, count as null."""
    try:
        return _BATCH.decode(raw)
    except UNREADABLE:
        repaired = _NOT_JSON.sub(rb"\1null", raw)
        if repaired == raw:
            raise
    return _BATCH.decode(repaired)


def decode_one(raw: bytes) -> Event:
    """An event with the mistakes that profilers make put right: other encodings, bare backslashes, nan and inf, numbers
    as text. Arguments that make no sense are as if they had not been recorded."""
    text = _repair(raw)
    try:
        return _LENIENT.decode(text)
    except UNREADABLE:
        return _salvage_event(text)


def _repair(raw: bytes) -> bytes:
    text = raw.decode("utf-8", "replace").encode()
    return _NOT_JSON.sub(rb"\1null", _BAD_ESCAPE.sub(rb"\\\\", text))


def _salvage_event(text: bytes) -> Event:
    document = msgspec.json.decode(text)
    if not isinstance(document, dict):
        raise msgspec.DecodeError("no event")
    recorded = document.pop("args", None)
    for key in document.keys() & {"pid", "tid"}:  # processes and threads are only told apart
        document[key] = str(document[key])
    event = msgspec.convert(document, Event, strict=False)
    if isinstance(recorded, dict):
        event.args = _read_arguments(recorded)
    return event


def _read_arguments(recorded: dict[str, Any]) -> Arguments:
    known = {}
    for field in _FIELDS:
        if field.encode_name in recorded:
            value = recorded[field.encode_name]
            try:
                known[field.name] = _convert_value(value, field.type)
            except UNREADABLE:
                if field.name == "device" and isinstance(value, str):
                    known[field.name] = number_at_end(value)
    return Arguments(**known)


def _convert_value(value: Any, kind: Any) -> Any:
    if kind is msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(value))
    return msgspec.convert(value, kind, strict=False)


def number_at_end(text: str) -> int:
    """The number with which the name of a stream or device ends ("stream 7", "cuda:0", "0x55d0"); -1 for none."""
    found = _AT_END.search(text)
    if found is None:
        return -1
    return int(found[0], 16 if found[0][:2].lower() == "0x" else 10)


_NANOSECONDS_FROM = 10**17  # microseconds since 1970 stay below this until the year 5138
_LARGEST_US = 9 * 10**15  # in nanoseconds this still fits into a column
_HOST = {int(Kind.OP), int(Kind.ANNOTATION)}
_CODES = {category: int(kind) for category, kind in CATEGORIES.items()} | {"nn.Module": int(Kind.MODULE)}
# what takes no time of its own: Python frames, the profiler's own marks
_NOT_COUNTED = frozenset({"python_function", "Trace", "ac2g", "fwdbwd", CATEGORY, ""})
_MOST_CATEGORIES = 20
_ON_TRACK = "gpu_user_annotation"  # nothing depends on one that makes no sense
_PYTHON, _MODULE = "python_function", "nn.Module: "
_ALLOCATION, _ON_HOST = "[memory]", 0  # an instant event, and the device type in it that is no accelerator
_NO_ARGUMENTS = Arguments()


class _KinetoSink(RowSink):
    """Turns batches of events into rows."""

    WHAT = "events"
    MEMBERS = ("distributedInfo", "deviceProperties", "schema", "baseTimeNanoseconds")

    def __init__(self) -> None:
        super().__init__(EVENT)
        self.tracks: Interner[tuple[int | str, int | str]] = Interner("threads")
        self.nanoseconds: bool | None = None
        self.device = -1  # that the first kernel ran on
        self._recorded: dict[bytes, int] = {}
        self._streams: Interner[str] = Interner("streams")  # that have a name but no number
        self.memory, self.python = TableBuilder(MEMORY), TableBuilder(MOMENT)
        self.unread: Counter[str] = Counter()
        self.counters = CounterReader(_repair)

    def add_batch(self, raw: bytes) -> bool:
        """Rows of a whole batch."""
        try:
            events = decode_batch(raw)
        except UNREADABLE:
            return False
        self.seen += len(events)
        self.counters.add_batch(raw)
        self._sort_events(events)
        return True

    def add_single(self, raw: bytes) -> None:
        """The row of an event in a batch that did not parse, as far as it can be understood."""
        self.seen += 1
        try:
            event = decode_one(raw)
        except UNREADABLE:
            self.skipped += 1
            return
        self.counters.add_batch(raw)
        self._sort_events([event])

    def _sort_events(self, events: list[Event]) -> None:
        """Keeps what took time, forward passes of modules, and allocations."""
        allocations, python = [], []
        for event in events:
            if event.cat == _PYTHON:
                python.append(event)
                if event.name.startswith(_MODULE):
                    event.cat, event.name = "nn.Module", event.name[len(_MODULE) :]
            elif event.name == _ALLOCATION and event.ph in ("i", "I"):
                allocations.append(event)
        self._keep_events([event for event in events if event.ph == "X" and event.cat in _CODES])
        self._count_unread(events)
        if allocations:
            self._keep_memory(allocations)
        if python:
            self._keep_python(python)

    def _count_unread(self, events: list[Event]) -> None:
        others = Counter(e.cat for e in events if e.ph == "X" and e.cat not in _CODES and e.cat not in _NOT_COUNTED)
        for category, count in others.items():
            if category in self.unread or len(self.unread) < _MOST_CATEGORIES:
                self.unread[category] += count

    def _keep_python(self, events: list[Event]) -> None:
        """The moments at which Python's tracer saw calls begin and end."""
        if self.nanoseconds is None:
            self.nanoseconds = abs(events[0].ts) >= _NANOSECONDS_FROM
        times = np.array([moment for event in events for moment in (event.ts, event.ts + event.dur)])
        largest = 1000 * _LARGEST_US if self.nanoseconds else _LARGEST_US
        times = times[abs(times) <= largest]
        rows = np.empty(len(times), dtype=MOMENT)
        rows["time"] = self._convert_clock(times)
        self.python.append_block(rows)

    def _keep_memory(self, events: list[Event]) -> None:
        """Rows of allocations on devices; those that make no sense are left out."""
        rows = [
            (
                event.ts,
                _read_integer(a.device_id) or 0,
                a.allocation,
                _parse_count(a.allocated),
                _parse_count(a.reserved),
                _parse_count(a.address),
            )
            for event in events
            if (a := event.args) is not None
            and _is_accelerator(a.device_type)
            and _is_plausible(event.ts, a.allocation)
        ]
        if rows:
            if self.nanoseconds is None:
                self.nanoseconds = abs(rows[0][0]) >= _NANOSECONDS_FROM
            table = np.empty(len(rows), dtype=MEMORY)
            for name, values in zip(MEMORY.names or (), zip(*rows, strict=True), strict=True):
                table[name] = self._convert_clock(np.array(values)) if name == "time" else values
            self.memory.append_block(table)

    def _keep_events(self, events: list[Event]) -> None:
        if not events:
            return
        if self.nanoseconds is None:
            self.nanoseconds = abs(events[0].ts) >= _NANOSECONDS_FROM
        largest = 1000 * _LARGEST_US if self.nanoseconds else _LARGEST_US
        starts, durations = np.array([e.ts for e in events]), np.array([e.dur for e in events])
        sound = (abs(starts) <= largest) & (durations >= 0) & (durations <= largest)
        if not sound.all():
            bad = [event for event, good in zip(events, sound.tolist(), strict=True) if not good]
            self.skipped += sum(event.cat != _ON_TRACK for event in bad)
            events = [event for event, good in zip(events, sound.tolist(), strict=True) if good]
            starts, durations = starts[sound], durations[sound]
        self.kept += len(events)
        if events:
            rows = self._make_rows(events)
            rows["start"], rows["duration"] = self._convert_clock(starts), self._convert_clock(durations)
            self.table.append_block(rows)

    def _make_rows(self, events: list[Event]) -> Table:
        """Rows without their times. Columns that no event of these kinds has are only filled."""
        arguments = [event.args or _NO_ARGUMENTS for event in events]
        rows = make_blank_events(len(events))
        kinds = [_CODES[event.cat] for event in events]
        present = set(kinds)
        rows["kind"] = kinds
        rows["name"] = list(map(self.names.__getitem__, [event.name for event in events]))
        rows["track"] = list(map(self.tracks.__getitem__, [(event.pid, event.tid) for event in events]))
        rows["external"] = [a.external if a.external >= 0 else a.external_old for a in arguments]
        rows["details"] = [self._number_details(a) if a.dims or a.collective or a.grid else 0 for a in arguments]
        if present & _HOST:
            rows["record_function"] = [a.record_function for a in arguments]
            rows["sequence"] = [a.sequence for a in arguments]
            rows["forward_thread"] = [a.forward_thread for a in arguments]
            rows["frames"] = [_count_frames(a.stack) if a.stack else 0 for a in arguments]
        if present - _HOST:
            rows["correlation"] = [a.correlation for a in arguments]
            rows["stream"] = [a.stream if isinstance(a.stream, int) else _parse_stream(a.stream) for a in arguments]
            rows["device"] = [a.device for a in arguments]
            self._assign_streams(rows, events, arguments)
            rows["sequence"] = [_number_node(a) if a.graph else sequence
                                for a, sequence in zip(arguments, rows["sequence"].tolist(), strict=True)]  # fmt: skip
            rows["bytes"] = [_parse_count(a.bytes) if a.bytes != -1 else -1 for a in arguments]
        if Kind.SYNC in present:
            rows["waits_for"] = [a.waits_for for a in arguments]
        if self.device < 0 and Kind.KERNEL in present:
            self.device = int(rows["device"][kinds.index(Kind.KERNEL)])
        return rows

    def _assign_streams(self, rows: Table, events: list[Event], arguments: list[Arguments]) -> None:
        """Gives what ran on a device its stream and device where the arguments have no number of them: the stream has a
        name, or both are those of the track."""
        on_device = np.isin(rows["kind"], DEVICE_KINDS)
        for place in np.flatnonzero(on_device & (rows["stream"] < 0)).tolist():
            named = arguments[place].stream
            rows["stream"][place] = self._number_stream(named if isinstance(named, str) else events[place].tid)
        for place in np.flatnonzero(on_device & (rows["device"] < 0)).tolist():
            process = events[place].pid
            rows["device"][place] = process if isinstance(process, int) else number_at_end(process)

    def _number_stream(self, stream: int | str) -> int:
        """The number of a stream; names that do not end in one are numbered downwards from -2."""
        if isinstance(stream, int):
            return stream
        number = number_at_end(stream)
        return number if number >= 0 else -2 - self._streams[stream]

    def _number_details(self, a: Arguments) -> int:
        """Number of the op's arguments; what equal ops recorded is put together only once."""
        recorded = b"|".join((a.dims, a.types, a.strides, a.concrete, a.grid, a.block, a.registers, a.shared))
        if a.collective:
            return self.details[_encode_details(a)]
        number = self._recorded.get(recorded)
        if number is None:
            number = self._recorded[recorded] = self.details[_encode_details(a)]
        return number

    def _convert_clock(self, values: Any) -> Any:
        if self.nanoseconds:
            return values
        if values.dtype.kind == "i":
            return values * 1000
        whole = np.floor(values)  # of microseconds since 1970 a product with 1000 would lose a quarter of one
        return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1e3).astype(np.int64)


def _number_node(a: Arguments) -> int:
    """The number of a graph's node; newer drivers have the graph's in it already."""
    if not 0 <= a.graph < 1 << 30 or a.node < 0:
        return -1
    return a.node if a.node >> GRAPH_SHIFT else (a.graph << GRAPH_SHIFT) + a.node


def _count_frames(stack: msgspec.Raw) -> int:
    """How many Python frames a recorded stack has; they are parted by semicolons."""
    return min(bytes(stack).count(b";") + 1, 0xFFFF) if len(stack) > len('""') else 0


def _parse_stream(handle: str) -> int:
    """The stream that a handle of the host means: the default one is 0, of any other the number is not known (-1)."""
    return 0 if handle in ("0x0", "0") else -1


def _parse_count(value: Any) -> int:
    """A number of bytes, which AMD's traces write as text."""
    if isinstance(value, str) and value.isdigit() and len(value) < 19:
        value = int(value)
    return int(value) if isinstance(value, (int, float)) and 0 <= value <= LIMIT else -1


def _is_plausible(time: float, allocation: Any) -> bool:
    """Whether a moment and a number of bytes fit into columns."""
    return abs(time) <= _LARGEST_US * 1000 and isinstance(allocation, int) and abs(allocation) <= _LARGEST_US


def _is_accelerator(device_type: Any) -> bool:
    """Whether memory is a device's: NVIDIA's are of type 1, AMD's of 1 or 6, Intel's 12, MTIA's 19, others' 20."""
    return isinstance(device_type, int) and device_type > _ON_HOST


def _encode_details(a: Arguments) -> bytes:
    """The recorded arguments as one JSON object; equal ops share it."""
    if a.grid:
        fields = ("grid", a.grid), ("block", a.block), ("registers", a.registers), ("shared", a.shared)
    else:
        fields = ("dims", a.dims), ("types", a.types), ("strides", a.strides), ("values", a.concrete)
    shapes = b"{" + b",".join(b'"%b":%b' % (name.encode(), value or b"null") for name, value in fields)
    if not a.collective:
        return shapes + b"}"
    collective = {
        "name": a.collective, "dtype": a.dtype, "in_elements": a.in_elements, "out_elements": a.out_elements,
        "in_split": a.in_split, "out_split": a.out_split, "group": a.group, "group_ranks": a.group_ranks,
        "group_size": a.group_size, "seq": a.order, "comms_id": a.comms_id,
    }  # fmt: skip
    return b'%b,"collective":%b}' % (shapes, msgspec.json.encode(collective))


def read_kineto(path: str | Path) -> TimelineTrace:
    """Reads a Kineto trace of any size in bounded memory. Rejects what would make a result wrong."""
    path = Path(path)
    sink = _KinetoSink()
    ended = scan_file(path, ("traceEvents",), sink)
    hint = " (it is an execution trace)" if "schema" in sink.members else ""
    notes = sink.check_rows(path, ended, f"no ops, launches or kernels of a Kineto trace{hint}")
    if sink.nanoseconds:
        notes.append("times are in nanoseconds")
    events, doubles = remove_duplicates(sink.table.finish_table())
    if doubles:
        notes.append(f"{doubles} events stand in the file more than once and count once")
    named = sink.members.get("distributedInfo")
    distributed = named if isinstance(named, dict) else {}
    return TimelineTrace(
        path=path,
        events=events,
        names=tuple(map(escape_text, sink.names)),
        details=tuple(sink.details),
        tracks=tuple(sink.tracks),
        rank=_read_integer(distributed.get("rank")),
        world_size=_read_integer(distributed.get("world_size")),
        device_name=_find_device_name(sink.members.get("deviceProperties"), max(sink.device, 0)),
        skipped=sink.skipped,
        notes=tuple(notes),
        unread=tuple((escape_text(name)[:40], count) for name, count in sink.unread.most_common()),
        memory=sink.memory.finish_table(),
        python=np.sort(sink.python.finish_table()["time"]),
        counters=tuple(sink.counters.ranges),
    )


def _read_integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 24 else None


def _find_device_name(properties: Any, number: int) -> str:
    """Name of a device ("" when the file does not say)."""
    listed = [device for device in properties if isinstance(device, dict)] if isinstance(properties, list) else []
    names = {find_driver_name(device) for device in listed}
    same = [find_driver_name(device) for device in listed if device.get("id") == number]
    # AMD's kernels name agents, which count the host's processors too: where all devices are alike it is one of them
    return escape_text(same[0] if same else names.pop() if len(names) == 1 else "")


def remove_duplicates(events: Table) -> tuple[Table, int]:
    """The events without those that equal an earlier one in everything, and how many were left out.

    Where nothing that ran on a device comes twice, nothing else is looked at: a file holds all of a run twice, or
    nothing of it.
    """
    device = np.flatnonzero(np.isin(events["kind"], DEVICE_KINDS))
    looked_at = device if len(device) else np.arange(len(events))
    if not len(_find_duplicates(events, looked_at)):
        return events, 0
    again = _find_duplicates(events, np.arange(len(events)))
    return np.delete(events, again), len(again)


def _find_duplicates(events: Table, rows: IndexArray) -> IndexArray:
    """Those of these rows that equal an earlier one. What took no time and has no number may well come twice."""
    numbered = np.any([events[column][rows] >= 0 for column in ("correlation", "external")], axis=0)
    rows = rows[numbered | (events["duration"][rows] > 0)]
    order = rows[np.lexsort([events[column][rows] for column in ("duration", "name", "track", "start")])]
    first, second = order[:-1], order[1:]
    alike = events["start"][first] == events["start"][second]
    first, second = first[alike], second[alike]
    equal = np.array(events[first] == events[second], dtype=np.bool_)
    return np.sort(second[equal])

"""Events of Kineto traces as they stand in the file, and what can be understood of those that are written oddly."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from traincast.traces.tables import UNREADABLE, Int

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
    "registers": "registers per thread", "shared": "shared memory", "order": "Seq", "meeting": "Comms Id",
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
    meeting: Any = ""
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
    text = raw.decode("utf-8", "replace").encode()
    text = _NOT_JSON.sub(rb"\1null", _BAD_ESCAPE.sub(rb"\\\\", text))
    try:
        return _LENIENT.decode(text)
    except UNREADABLE:
        return _salvage_event(text)


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

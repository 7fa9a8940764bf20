"""Chakra execution traces (`.et`, plain or gzip): length-delimited protobuf, read without a protobuf package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from traincast.traces.events import LIMIT
from traincast.traces.execution import ExecutionTrace, NodeSink, Row, finish_trace
from traincast.traces.scan import MAX_VALUE, ByteSource
from traincast.utils.errors import TraincastError

_READ = 1 << 19  # bytes at a time: large enough that reading costs nothing, small alongside any trace
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
# field numbers of Chakra's Node message, and of AttributeProto's integer and text members. Control dependencies are
# not used: Chakra's own converter leaves node numbers in them from before it renumbered the nodes
_ID, _NAME, _TYPE, _, _DATA, _START, _DURATION, _INPUTS, _OUTPUTS, _ATTRIBUTE = range(1, 11)
_INTEGERS, _TEXT = (5, 7, 9, 11, 13, 15, 17, 19), 29


class ShortError(Exception):
    """The message goes on behind the bytes at hand."""


def read_chakra(path: str | Path) -> ExecutionTrace:
    """Reads a Chakra trace of any size in bounded memory."""
    path = Path(path)
    source, sink = ByteSource(path), NodeSink()
    schema, ended = "", ""
    try:
        for index, message in enumerate(_read_messages(source)):
            if message is None:
                ended = "an unfinished message"
                break
            if index == 0:
                schema = _read_schema(message)
            else:
                sink.seen += 1
                _keep_message(message, sink)
    except (ShortError, UnicodeDecodeError):
        raise TraincastError(f"'{path}' is not a Chakra trace: its messages make no sense") from None
    finally:
        source.close()
    return finish_trace(path, sink, schema, ended or source.damaged)


def _read_messages(source: ByteSource) -> Iterator[bytes | None]:
    """The messages of the file; None when the last one is cut off."""
    buffer, more, first = b"", True, True
    while True:
        at = 0
        while at < len(buffer):
            try:
                size, start = _read_varint(buffer, at)
            except ShortError:
                if len(buffer) - at >= 10:
                    raise
                break
            if size > MAX_VALUE:
                raise TraincastError(f"'{source.path}' is not a Chakra trace: a message of {size} bytes")
            if not size and not first:  # nodes have a name and a number; only what stands before them may say nothing
                raise ShortError
            if start + size > len(buffer):
                break
            first = False
            yield buffer[start : start + size]
            at = start + size
        if not more:
            if at < len(buffer):
                yield None
            return
        data = source.read(_READ)
        more = bool(data)
        buffer = buffer[at:] + data


def _keep_message(message: bytes, sink: NodeSink) -> None:
    try:
        row, needs = _read_node(message, sink)
    except (ShortError, UnicodeDecodeError):
        sink.skipped += 1
        return
    sink.add_dependencies(needs)
    sink.add_rows([row])


def _read_node(message: bytes, sink: NodeSink) -> tuple[Row, list[int]]:
    numbers: dict[int, int] = {}
    attributes: dict[str, int | str] = {}
    needs: list[int] = []
    name, sides = "", [b"", b""]
    for field, value in _read_fields(message):
        if isinstance(value, int):
            if field == _DATA:
                needs.append(value)
            numbers[field] = value
        elif field == _NAME:
            name = value.decode()
        elif field == _DATA:
            needs += _read_packed(value)
        elif field == _ATTRIBUTE:
            key, content = _read_attribute(value)
            attributes[key] = content
        elif field in (_INPUTS, _OUTPUTS):
            sides[field - _INPUTS] = value
    row = (
        _limit_value(numbers.get(_ID, 0)),
        0,
        _get_number(attributes, "rf_id", -1),
        _get_number(attributes, "seq_id", -1),
        _get_number(attributes, "fw_parent", 0),
        1000 * _limit_value(numbers.get(_START, 0), 1 << 50),
        1000 * _limit_value(numbers.get(_DURATION, 0), 1 << 50),
        _get_number(attributes, "tid", 0),
        sink.names[name],
        sink.details[_read_arguments(*sides)],
        sink.schemas[str(attributes.get("op_schema", ""))],
        _limit_value(numbers.get(_TYPE, 0), 1 << 16),
    )
    return row, [_limit_value(need) for need in needs]


def _limit_value(value: int, limit: int = LIMIT) -> int:
    if value > limit:
        raise ShortError
    return value


def _get_number(attributes: dict[str, int | str], key: str, default: int) -> int:
    value = attributes.get(key, default)
    return value if isinstance(value, int) and abs(value) <= LIMIT else default


def _read_arguments(inputs: bytes, outputs: bytes) -> bytes:
    """Shapes and types of an IOInfo (fields 2 and 3), which Chakra writes as Python literals."""
    parts = []
    for side in (inputs, outputs):
        texts = {field: value for field, value in _read_fields(side) if isinstance(value, bytes)}
        parts += [texts.get(2, b"null"), texts.get(3, b"null").replace(b"'", b'"')]
    return b'{"dims":%b,"types":%b,"output_dims":%b,"output_types":%b}' % tuple(parts)


def _read_attribute(message: bytes) -> tuple[str, int | str]:
    name, content = "", ""
    value: int | str = content
    for field, raw in _read_fields(message):
        if field == 1 and isinstance(raw, bytes):
            name = raw.decode()
        elif field == _TEXT and isinstance(raw, bytes):
            value = raw.decode()
        elif field in _INTEGERS and isinstance(raw, int):
            value = raw - (1 << 64) if raw >> 63 else raw
    return name, value


def _read_schema(message: bytes) -> str:
    """The schema of the PyTorch trace behind it: an attribute of GlobalMetadata."""
    for field, value in _read_fields(message):
        if field == 2 and isinstance(value, bytes):
            key, content = _read_attribute(value)
            if key == "schema":
                return str(content)
    return ""


def _read_packed(data: bytes) -> list[int]:
    values, at = [], 0
    while at < len(data):
        value, at = _read_varint(data, at)
        values.append(value)
    return values


def _read_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        wire = key & 7
        if wire == _VARINT:
            number, at = _read_varint(message, at)
            yield key >> 3, number
            continue
        if wire == _BYTES:
            size, at = _read_varint(message, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ShortError
        if at + size > len(message):
            raise ShortError
        yield key >> 3, message[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise ShortError
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ShortError

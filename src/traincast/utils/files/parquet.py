"""How much a Parquet file unpacks to, told from its footer before anything of it is decoded.

The footer is a struct of Thrift's compact protocol; the standard library and polars do not show its sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traincast.utils.errors import TraincastError

MAX_ROWS = 5_000_000
"""More is taken for a mistake: no public table has as many, and memory would not hold them."""
MAX_BYTES = 1 << 30
"""Of all columns, decompressed; the largest public table has about 130 MB."""
_MAX_FOOTER = 4 << 20  # bytes; a footer grows with columns and row groups, those of public tables have a few kB
_MAX_DEPTH = 32  # of structs and lists; a footer's own structure has six levels
_MAGIC = b"PAR1"
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_ROWS, _GROUPS = 3, 4  # fields of FileMetaData
_COLUMNS, _GROUP_BYTES = 1, 2  # of its RowGroup: columns and total_byte_size
_COLUMN_META, _NUM_VALUES = 3, 5  # of a ColumnChunk, and of its ColumnMetaData


def check_parquet_size(path: Path, name: str, *, in_pieces: bool = False) -> None:
    """Refuses a file whose footer makes no sense or announces more than can be read; `name` is for the message.

    A file that is read `in_pieces` may have any number of row groups, of which each has to keep to the limit.
    """
    footer = _footer(path, name)
    try:
        fields = _Thrift(footer).struct(0)
        rows = int(fields[_ROWS])
        sizes = [_unpacked(group) for group in fields[_GROUPS]]
    except (IndexError, KeyError, TypeError, ValueError):
        raise TraincastError(f"cannot read '{name}': its Parquet footer makes no sense") from None
    if rows > MAX_ROWS and not in_pieces:
        raise TraincastError(f"'{name}' has {rows} rows; at most {MAX_ROWS} are read")
    size = max(sizes, default=0) if in_pieces else sum(sizes)
    if size > MAX_BYTES:
        remedy = "write it in smaller row groups" if in_pieces else "give a part of it"
        raise TraincastError(
            f"'{name}' unpacks to {size / 1e9:.1f} GB; at most {MAX_BYTES / 1e9:.1f} GB are read: {remedy}"
        )


def _unpacked(group: dict[int, Any]) -> int:
    """Bytes of a row group in memory: decompressed, and with runs of equal values written out as 8 bytes each."""
    values = sum(int(column[_COLUMN_META][_NUM_VALUES]) for column in group[_COLUMNS])
    return max(int(group[_GROUP_BYTES]), 8 * values)


def _footer(path: Path, name: str) -> bytes:
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 8))
        tail = file.read(8)
        size = int.from_bytes(tail[:4], "little")
        if end < 12 or tail[4:] != _MAGIC or size > end - 12:
            raise TraincastError(f"cannot read '{name}': it is no Parquet file")
        if size > _MAX_FOOTER:
            raise TraincastError(f"cannot read '{name}': its Parquet footer has {size} bytes, more than {_MAX_FOOTER}")
        file.seek(end - 8 - size)
        return file.read(size)


class _Thrift:
    """A reader of Thrift's compact protocol; an IndexError or ValueError where the bytes make no sense."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self, depth: int) -> dict[int, Any]:
        """The fields of a struct by number."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while header := self._byte():
            number = number + (header >> 4) if header >> 4 else self._signed()
            kind = header & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth + 1)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE, _BYTE):  # inside lists each takes a byte
            return self._byte()
        if kind in (_I16, _I32, _I64):
            return self._signed()
        if kind in (_DOUBLE, _BINARY):
            size = 8 if kind == _DOUBLE else self._varint()
            self._at += size
            return None
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind == _STRUCT:
            return self.struct(depth)
        raise ValueError("a kind of value that footers do not have")

    def _list(self, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        header = self._byte()
        count = header >> 4 if header >> 4 < 15 else self._varint()
        if count > len(self._data):  # every item takes a byte at least
            raise ValueError("more items than bytes")
        return [self._value(header & 15, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number of more than ten bytes")

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

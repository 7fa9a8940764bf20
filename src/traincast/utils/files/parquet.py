"""Parquet files of others, held to a size before polars unpacks them: a few kB can hold billions of numbers.

How many there are stands in the footer, which is Thrift's compact protocol (parquet.thrift): it is read here as far as
that, within the limits of a file that a person may have sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.utils.errors import TraincastError, shorten_value

if TYPE_CHECKING:
    import polars as pl

MAX_ROWS = 5_000_000
"""More is taken for a mistake: no public table has as many, and memory would not hold them."""
PARQUET_BYTES = 1 << 30
"""Of all columns at 8 bytes a value; the largest public table has about 130 MB."""
_VALUE_BYTES = 8
ROW_GROUP_VALUES = 1 << 26
"""Of a column that is read piece by piece: a row group is unpacked whole."""
_TAIL, _MAGIC = 8, b"PAR1"  # bytes behind the footer: its size, and what says that it is Parquet
_LARGEST_FOOTER = 1 << 24
_DEEPEST = 16  # structs of Thrift in each other
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT, _UUID = 1, 2, 3, 7, 8, 9, 10, 12, 13
_ROW_GROUPS, _COLUMNS, _METADATA, _PATH, _NUM_VALUES = 4, 1, 3, 3, 5  # fields


class _Footer:
    """Reads values one after the other; structs are dicts by the numbers of their fields."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        """The fields of a struct."""
        if depth > _DEEPEST:
            raise ValueError("nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._read_byte():
            number = number + (kind >> 4) if kind >> 4 else self._read_signed()
            kind &= 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._read_value(kind, depth)
        return fields

    def _read_value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE, _BYTE):  # inside of a list a boolean is a byte
            return self._read_byte()
        if kind in (4, 5, 6):
            return self._read_signed()
        if kind in (_DOUBLE, _UUID):
            return self._take(8 if kind == _DOUBLE else 16)
        if kind == _BINARY:
            return self._take(self._read_number())
        if kind in (_LIST, _SET):
            head = self._read_byte()
            size = self._read_number() if head >> 4 == 15 else head >> 4
            return [self._read_item(head & 15, depth) for _ in range(self._check(size))]
        if kind == _STRUCT:
            return self.read_struct(depth + 1)
        raise ValueError(f"a value of kind {kind}")

    def _read_item(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("nested too deeply")
        return self._read_value(kind, depth + 1)

    def _read_byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _read_number(self) -> int:
        value = shift = 0
        while True:
            byte = self._read_byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _read_signed(self) -> int:
        value = self._read_number()
        return value >> 1 ^ -(value & 1)

    def _check(self, size: int) -> int:
        if size > len(self.data) - self.at:  # an item takes a byte or more
            raise ValueError("a list longer than its file")
        return size

    def _take(self, size: int) -> bytes:
        piece = self.data[self.at : self.at + self._check(size)]
        self.at += size
        return piece


def count_values(path: Path, name: str) -> list[dict[str, int]]:
    """How many values each row group has, by column; those inside of lists count. Pipes and devices are rejected, never
    waited for; that there is no such file is a FileNotFoundError."""
    if path.exists() and not path.is_file():
        raise TraincastError(f"{name}: not a regular file; give the path of a file")
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - _TAIL))
            tail = file.read(_TAIL)
            size = int.from_bytes(tail[:4], "little")
            if tail[4:] != _MAGIC or not 0 < size <= min(_LARGEST_FOOTER, length - _TAIL):
                raise ValueError("no footer, or one of more than 16 MiB")
            file.seek(length - _TAIL - size)
            footer = _Footer(file.read(size)).read_struct()
        groups = []
        for group in footer.get(_ROW_GROUPS, []):
            counts: dict[str, int] = {}
            for column in group[_COLUMNS]:
                about = column[_METADATA]
                values = about[_NUM_VALUES]
                if not isinstance(values, int) or values < 0:
                    raise ValueError("a column without a number of values")
                first = about[_PATH][0].decode("utf-8", "replace")
                counts[first] = counts.get(first, 0) + values
            groups.append(counts)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TraincastError(f"{name}: it is no Parquet file that can be read ({error}); write it again") from None
    return groups


@contextmanager
def reject_bad_parquet(name: str) -> Iterator[None]:
    """Whatever the reader of Parquet files raises on a damaged one, its panics included, is bad input. Needs polars.

    What it prints of a panic, past Python to the error stream of the process, is dropped.
    """
    import polars as pl

    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    except pl.exceptions.PanicException:
        raise TraincastError(
            f"{name}: it is no Parquet file that can be read: damaged inside; write it again"
        ) from None
    except pl.exceptions.PolarsError as error:
        reason = (str(error).splitlines() or ["unreadable"])[0][:200]
        raise TraincastError(f"{name}: it is no Parquet file that can be read ({reason})") from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def scan_parquet(path: Path, name: str) -> pl.LazyFrame:
    """A file whose row groups can be read one by one; `name` is for the message."""
    import polars as pl

    for group in count_values(path, name):
        for column, values in group.items():
            if values > ROW_GROUP_VALUES:
                raise TraincastError(
                    f"{name}: {values} values of column {shorten_value(column)} in one row group; at most "
                    f"{ROW_GROUP_VALUES} are read at once: write it in smaller row groups"
                )
    with reject_bad_parquet(name):
        return pl.scan_parquet(path)


def check_parquet_size(path: Path, name: str) -> None:
    """Rejects a file that is no Parquet file or holds more than can be read at once; `name` is for the message. Needs
    polars."""
    import polars as pl

    groups = count_values(path, name)
    with reject_bad_parquet(name):
        rows = int(pl.scan_parquet(path).select(pl.len()).collect().item())
    if rows > MAX_ROWS:
        raise TraincastError(f"'{name}' has {rows} rows; at most {MAX_ROWS} are read")
    size = _VALUE_BYTES * sum(sum(group.values()) for group in groups)
    if size > PARQUET_BYTES:
        raise TraincastError(
            f"'{name}' unpacks to {size / 1e9:.1f} GB; at most {PARQUET_BYTES / 1e9:.1f} GB are read: give a part of it"
        )


def read_parquet(path: Path, name: str, n_rows: int | None = None) -> pl.DataFrame:
    """A file that holds no more than can be read at once, the text of its rows included: in a file and in polars rows
    share equal texts, in Python each has its own. Needs polars."""
    import polars as pl

    check_parquet_size(path, name)
    with reject_bad_parquet(name):
        frame = pl.read_parquet(path, n_rows=n_rows)
        texts = sum(int(one.str.len_bytes().sum()) for one in frame.select(pl.col(pl.String)).iter_columns())
    if texts > PARQUET_BYTES:
        raise TraincastError(f"'{name}' has {texts / 1e9:.1f} GB of text in its rows; give shorter names")
    return frame

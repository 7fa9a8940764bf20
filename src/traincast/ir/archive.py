"""A bounded zip of JSON and integer arrays: deterministic bytes out, nothing trusted on the way in."""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traincast.utils.errors import TraincastError, shorten_value

MAX_TOTAL_BYTES = 512 << 20  # chosen as a limit against zip bombs, like the two below
MAX_JSON_BYTES = 16 << 20  # names and signatures
_MAX_DIRECTORY_BYTES = 4 << 20  # the list of members
_END_RECORD = struct.Struct("<4s4H2IH")
_NPY_HEADER = re.compile(
    rb"\{'descr': '([<|]i[1248])', 'fortran_order': False, 'shape': \((\d{1,12}), ?(\d{1,12})?\), \} *\n"
)
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error,
           OverflowError, LookupError)  # fmt: skip

Array = npt.NDArray[np.signedinteger]


def pack_members(members: Mapping[str, bytes]) -> bytes:
    """A zip of these members in this order, with fixed dates: the same members give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data, compresslevel=9)
    return buffer.getvalue()


def pack_array(array: Array) -> bytes:
    """An integer array as .npy, in the smallest type that holds its values."""
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    small = next(
        t for t in (np.int8, np.int16, np.int32, np.int64) if np.iinfo(t).min <= low and high <= np.iinfo(t).max
    )
    buffer = io.BytesIO()
    little_endian = array.astype(np.dtype(small).newbyteorder("<"), order="C")
    np.lib.format.write_array(buffer, little_endian, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


class Archive:
    """The members of a zip, read one at a time within `MAX_TOTAL_BYTES` bytes for all of them."""

    def __init__(self, path: Path) -> None:
        try:
            data = _read_file(path)
        except OSError as error:
            raise TraincastError(f"cannot be read: {error.strerror or error}") from None
        _check_end(data)
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except _DAMAGE:
            raise TraincastError("its zip directory is damaged") from None
        infos = self._zip.infolist()
        self._info = {info.filename: info for info in infos}
        if len(self._info) != len(infos):
            raise TraincastError("two members have the same name")
        if sum(info.file_size for info in infos) > MAX_TOTAL_BYTES:
            raise TraincastError(f"its members unpack to more than {MAX_TOTAL_BYTES >> 20} MiB")
        self._budget = MAX_TOTAL_BYTES

    @property
    def names(self) -> set[str]:
        """Names of the members."""
        return set(self._info)

    def read(self, name: str) -> bytes:
        """The bytes of a member, checked against its checksum."""
        if name not in self._info:
            raise TraincastError(f"member '{name}' is missing")
        info = self._info[name]
        try:
            with self._zip.open(info) as stream:
                data = stream.read(info.file_size + 1)
        except (*_DAMAGE, OSError):
            raise TraincastError(f"member '{name}' is damaged") from None
        if len(data) != info.file_size:
            raise TraincastError(f"member '{name}' is cut short")
        return data

    def read_json_text(self, name: str) -> bytes:
        """The bytes of a JSON member, at most `MAX_JSON_BYTES`."""
        if name in self._info and self._info[name].file_size > MAX_JSON_BYTES:
            raise TraincastError(f"member '{name}' unpacks to more than {MAX_JSON_BYTES >> 20} MiB")
        return self.read(name)

    def array(self, name: str, dtype: type[np.int32] | type[np.int64], columns: int = 0) -> Array:
        """An integer array member as `dtype`: of one dimension, or of two with this many `columns`."""
        data = self.read(name)
        kind, shape, start = _parse_npy_header(data, name)
        if len(shape) != (2 if columns else 1) or (columns and shape[1] != columns):
            raise TraincastError(f"member '{name}' has shape {shape}, not (n{f', {columns}' if columns else ','})")
        if int(np.prod(shape, dtype=object)) * kind.itemsize != len(data) - start:
            raise TraincastError(f"member '{name}' holds {len(data) - start} bytes, not shape {shape} of {kind.name}")
        raw = np.frombuffer(data, dtype=kind, offset=start).reshape(shape)
        self._budget -= raw.size * np.dtype(dtype).itemsize
        if self._budget < 0:
            raise TraincastError(f"its arrays need more than {MAX_TOTAL_BYTES >> 20} MiB")
        limits = np.iinfo(dtype)
        if raw.size and (int(raw.min()) < limits.min or int(raw.max()) > limits.max):
            raise TraincastError(f"member '{name}' has values beyond {limits.bits} bits")
        return raw.astype(dtype)


def _read_file(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise TraincastError("cannot be read: it is no file")
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_TOTAL_BYTES:
            raise TraincastError(f"is larger than {MAX_TOTAL_BYTES >> 20} MiB")
        return stream.read(size)


def _check_end(data: bytes) -> None:
    """Rejects what is no plain zip before `zipfile` builds an object per directory entry."""
    if not data.startswith(b"PK\x03\x04"):
        raise TraincastError("is not a Traincast workload file (not a zip)")
    end = data[-_END_RECORD.size :]
    if len(end) < _END_RECORD.size or not end.startswith(b"PK\x05\x06"):
        raise TraincastError("is cut short or damaged: it does not end like a zip")
    directory_bytes = _END_RECORD.unpack(end)[5]
    if directory_bytes > _MAX_DIRECTORY_BYTES or data[-42:-38] == b"PK\x06\x07":
        raise TraincastError(f"has a zip directory of more than {_MAX_DIRECTORY_BYTES >> 20} MiB")


def _parse_npy_header(data: bytes, name: str) -> tuple[np.dtype[np.signedinteger], tuple[int, ...], int]:
    """Type, shape and start of the values. Only what `pack_array` writes is known: no parser, no pickle."""
    start = 10 + int.from_bytes(data[8:10], "little")
    match = _NPY_HEADER.fullmatch(data[10:start]) if data.startswith(b"\x93NUMPY\x01\x00") else None
    if not match:
        raise TraincastError(f"member '{name}' is no array of integers: {shorten_value(data[:70])}")
    kind, rows, columns = match.groups()
    return np.dtype(kind.decode()), (int(rows), *([int(columns)] if columns else [])), start

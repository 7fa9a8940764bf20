"""Workloads on disk: a `.tc` file is a bounded zip of `workload.json` and one integer array per column; nothing in it
is trusted.

See docs/how-it-works/ir.md. Files are untrusted: loading gives a valid workload or one `TraincastError`.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from traincast.ir.formula import Formula, OpCost, read_op_costs
from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.ir.program import Columns, Program
from traincast.ir.sizes import MONOMIALS, SizeRef, SizeTable
from traincast.ir.validate import validate_workload
from traincast.ir.workload import DEFAULT_TF32, Workload
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.reading import parse_json
from traincast.utils.files.writing import write_bytes

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


Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
T = TypeVar("T", str, int, bool, list["Json"], dict[str, "Json"])

_KINDS = {str: "text", int: "an integer", bool: "true or false", list: "a list", dict: "an object"}
_MAX_DEPTH = 8  # a limit against damaged files: arguments of PyTorch's ops are lists of numbers at most


def read_member(table: dict[str, Json], key: str, kind: type[T]) -> T:
    """The value under `key`, which must be of `kind`."""
    if key not in table:
        raise TraincastError(f"'{key}' is missing in workload.json")
    return check_type(table[key], kind, f"'{key}'")


def check_type(value: Json, kind: type[T], what: str) -> T:
    """The value itself when it is of exactly this JSON type."""
    if type(value) is not kind:
        raise TraincastError(f"{what} in workload.json must be {_KINDS[kind]}, not {shorten_value(value)}")
    return value


def check_list_of(value: Json, kind: type[T], what: str) -> list[T]:
    """The value itself when it is a list of exactly this JSON type."""
    items = check_type(value, list, what)
    good = [item for item in items if type(item) is kind]
    if len(good) < len(items):
        wrong = next(item for item in items if type(item) is not kind)
        raise TraincastError(f"an entry of {what} in workload.json must be {_KINDS[kind]}, not {shorten_value(wrong)}")
    return good


def encode_signatures(signatures: tuple[Signature, ...]) -> dict[str, Json]:
    """The distinct tensor specs as `tensors`, and the signatures that refer to them by index."""
    specs: dict[TensorSpec, int] = {}

    def index(spec: TensorSpec) -> Json:
        return specs.setdefault(spec, len(specs))

    rows: list[Json] = [
        [
            s.name,
            s.overload,
            [index(spec) for spec in s.inputs],
            [index(spec) for spec in s.outputs],
            [[name, _encode_scalar(value)] for name, value in s.scalars],
            [[name, count] for name, count in s.groups],
        ]
        for s in signatures
    ]
    tensors: list[Json] = [[t.dtype, t.device, list(t.shape), list(t.stride)] for t in specs]
    return {"tensors": tensors, "signatures": rows}


def decode_signatures(table: dict[str, Json]) -> tuple[Signature, ...]:
    """The signatures that `encode_signatures` wrote."""
    specs = [_decode_spec(row) for row in read_member(table, "tensors", list)]

    def spec(value: Json) -> TensorSpec:
        number = check_type(value, int, "a tensor number")
        if not 0 <= number < len(specs):
            raise TraincastError(f"a signature refers to tensor form {number} of {len(specs)}")
        return specs[number]

    return tuple([_decode_signature(row, spec) for row in read_member(table, "signatures", list)])


def _decode_spec(row: Json) -> TensorSpec:
    dtype, device, shape, stride = _check_fields(row, 4, "a tensor form")
    return TensorSpec(
        tuple(check_list_of(shape, int, "a shape")),
        tuple(check_list_of(stride, int, "a stride")),
        check_type(dtype, str, "a dtype"),
        check_type(device, str, "a device"),
    )


def _decode_signature(row: Json, spec: Callable[[Json], TensorSpec]) -> Signature:
    name, overload, inputs, outputs, scalars, groups = _check_fields(row, 6, "a signature")
    return Signature(
        name=check_type(name, str, "an op name"),
        inputs=tuple([spec(item) for item in check_type(inputs, list, "inputs")]),
        outputs=tuple([spec(item) for item in check_type(outputs, list, "outputs")]),
        scalars=tuple([_decode_argument(item) for item in check_type(scalars, list, "scalars")]),
        groups=tuple([_decode_group(item) for item in check_type(groups, list, "groups")]),
        overload=check_type(overload, str, "an overload"),
    )


def _decode_argument(row: Json) -> tuple[str, Scalar]:
    name, value = _check_fields(row, 2, "a scalar argument")
    return check_type(name, str, "an argument name"), _decode_scalar(value, _MAX_DEPTH)


def _decode_group(row: Json) -> tuple[str, int]:
    name, count = _check_fields(row, 2, "a tensor group")
    return check_type(name, str, "an argument name"), check_type(count, int, "a group's count")


def _check_fields(row: Json, count: int, what: str) -> list[Json]:
    items = check_type(row, list, what)
    if len(items) != count:
        raise TraincastError(f"{what} in workload.json must have {count} entries, not {len(items)}")
    return items


def _encode_scalar(value: Scalar) -> Json:
    """JSON has no tuple, no infinity and no reference to a size: the last two become one-key objects."""
    if isinstance(value, tuple):
        return [_encode_scalar(item) for item in value]
    if isinstance(value, SizeRef):
        return {"size": int(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _decode_scalar(value: Json, depth: int) -> Scalar:
    if isinstance(value, list):
        if not depth:
            raise TraincastError(f"a scalar argument in workload.json is nested deeper than {_MAX_DEPTH}")
        return tuple([_decode_scalar(item, depth - 1) for item in value])
    if isinstance(value, dict):
        if list(value) == ["size"]:
            return SizeRef(read_member(value, "size", int))
        if value in ({"float": "inf"}, {"float": "-inf"}, {"float": "nan"}):
            return float(read_member(value, "float", str))
        raise TraincastError(f"a scalar argument in workload.json is {shorten_value(value)}, which means nothing")
    return value


FORMAT = "traincast-workload"
VERSION = 2  # rises by one with every change that an old reader could misunderstand
_MONOMIALS_OF_1 = 6  # sizes of version 1 have no term of the batch size squared
MAX_PROGRAMS = 1024  # of ranks that differ; chosen as a limit against damaged files


def save_workload(workload: Workload, path: str | Path) -> None:
    """Writes the workload as a `.tc` file: whole or not at all, and the same bytes for the same workload."""
    validate_workload(workload)
    if len(workload.programs) > MAX_PROGRAMS:
        raise TraincastError(
            f"workload '{workload.name}' has {len(workload.programs)} programs; a file holds {MAX_PROGRAMS}"
        )
    version = _choose_version(workload)
    members = {"workload.json": json.dumps(_describe_head(workload), separators=(",", ":"), allow_nan=False).encode()}
    for number, program in enumerate(workload.programs):
        for column in Columns.names():
            members[_name_member(number, column)] = pack_array(getattr(program.columns, column))
        for field in fields(SizeTable):
            held = getattr(program.sizes, field.name)
            if field.name == "coefficients" and version == 1:
                held = np.ascontiguousarray(held[:, :_MONOMIALS_OF_1])
            members[_name_member(number, f"size_{field.name}")] = pack_array(held)
    write_bytes(path, pack_members(members))


def _choose_version(workload: Workload) -> int:
    """The oldest version that holds the workload: readers of that one understand it."""
    squared = any(np.any(program.sizes.coefficients[:, _MONOMIALS_OF_1:]) for program in workload.programs)
    return 2 if squared or workload.costs or workload.assumptions else 1


def load_workload(path: str | Path) -> Workload:
    """Reads a `.tc` file and validates it."""
    try:
        archive = Archive(Path(path))
        head = _parse_head(archive.read_json_text("workload.json"))
        _check_version(head)
        workload = _read_workload(head, archive)
        validate_workload(workload)
    except TraincastError as error:
        raise TraincastError(f"{path}: {error}") from None
    return workload


def _name_member(program: int, column: str) -> str:
    return f"programs/{program}/{column}.npy"


def _describe_head(workload: Workload) -> dict[str, Json]:
    return {
        "format": FORMAT,
        "version": _choose_version(workload),
        "name": workload.name,
        "mode": workload.mode,
        "ranks": list(workload.ranks),
        "synchronised": workload.synchronised,
        "framework_version": workload.framework_version,
        "tf32": list(workload.tf32),
        "meta": dict(workload.meta),
        **({"costs": {cost.op: dict(_encode_cost(cost)) for cost in workload.costs}} if workload.costs else {}),
        **({"assumptions": list(workload.assumptions)} if workload.assumptions else {}),
        "programs": [
            {
                "batch_size": program.batch_size,
                "seq_len": program.seq_len,
                "rigid": program.rigid,
                "names": list(program.names),
                **encode_signatures(program.symbolic),
            }
            for program in workload.programs
        ],
    }


def _encode_cost(cost: OpCost) -> dict[str, str]:
    """A cost as formulas."""
    for part, text in cost.as_text().items():
        if not isinstance(getattr(cost, part), Formula):
            raise TraincastError(f"{part} of {cost.op} is {text}, which a file cannot hold; give a formula instead")
    return cost.as_text()


def _parse_head(text: bytes) -> dict[str, Json]:
    return check_type(parse_json(text, "workload.json"), dict, "the top level")


def _check_version(head: dict[str, Json]) -> None:
    if head.get("format") != FORMAT:
        raise TraincastError(f"is not a Traincast workload file (its format is {shorten_value(head.get('format'))})")
    version = read_member(head, "version", int)
    if version > VERSION:
        raise TraincastError(
            f"written by a newer Traincast (format {shorten_value(version)}); this one reads up to {VERSION}: upgrade"
        )
    if version < 1:
        raise TraincastError(f"format version {shorten_value(version)} does not exist")


def _read_workload(head: dict[str, Json], archive: Archive) -> Workload:
    version = read_member(head, "version", int)
    tables = check_list_of(read_member(head, "programs", list), dict, "'programs'")
    if len(tables) > MAX_PROGRAMS:
        raise TraincastError(f"has {len(tables)} programs; at most {MAX_PROGRAMS} can be read")
    meta = read_member(head, "meta", dict)
    workload = Workload(
        name=read_member(head, "name", str),
        programs=tuple([_read_program(table, number, archive, version) for number, table in enumerate(tables)]),
        ranks=tuple(check_list_of(read_member(head, "ranks", list), int, "'ranks'")),
        mode=read_member(head, "mode", str),
        synchronised=read_member(head, "synchronised", bool),
        framework_version=read_member(head, "framework_version", str),
        tf32=tuple(check_list_of(check_type(head.get("tf32", list(DEFAULT_TF32)), list, "'tf32'"), str, "'tf32'")),
        costs=read_op_costs(check_type(head.get("costs", {}), dict, "'costs'"), "'costs'"),
        assumptions=tuple(
            check_list_of(check_type(head.get("assumptions", []), list, "'assumptions'"), str, "'assumptions'")
        ),
        meta={key: check_type(value, str, f"meta {shorten_value(key)}") for key, value in meta.items()},
    )
    per_program = (*Columns.names(), *(f"size_{field.name}" for field in fields(SizeTable)))
    known = {"workload.json", *(_name_member(n, column) for n in range(len(tables)) for column in per_program)}
    for name in sorted(archive.names - known):
        raise TraincastError(f"has a member {shorten_value(name)} that does not belong to it")
    return workload


def _read_coefficients(archive: Archive, member_name: str, version: int) -> IntArray:
    """Coefficients of sizes; files of version 1 have none of the batch size squared."""
    columns = _MONOMIALS_OF_1 if version == 1 else len(MONOMIALS)
    held = archive.array(member_name, np.int64, columns)
    return np.pad(held, ((0, 0), (0, len(MONOMIALS) - columns)))


def _read_program(table: dict[str, Json], number: int, archive: Archive, head_version: int) -> Program:
    columns = {name: archive.array(_name_member(number, name), np.int32) for name in Columns.names()}
    coefficients = _read_coefficients(archive, _name_member(number, "size_coefficients"), head_version)
    denominator, multiple = (
        archive.array(_name_member(number, f"size_{name}"), np.int64) for name in ("denominator", "seq_multiple")
    )
    return Program(
        sizes=SizeTable(coefficients, denominator, multiple),
        symbolic=decode_signatures(table),
        names=tuple(check_list_of(read_member(table, "names", list), str, "'names'")),
        columns=Columns(**columns),
        batch_size=read_member(table, "batch_size", int),
        seq_len=read_member(table, "seq_len", int),
        rigid=read_member(table, "rigid", str),
    )

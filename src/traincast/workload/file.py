"""Workloads on disk: a `.tc` file is a zip of `workload.json` and one integer array per column.

See docs/how-it-works/workload.md. Files are untrusted: loading gives a valid workload or one `TraincastError`.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np

from traincast.errors import TraincastError, shown
from traincast.files.reading import parse_json
from traincast.files.writing import write_bytes
from traincast.workload.archive import Archive, pack, pack_array
from traincast.workload.codec import Json, decode_signatures, encode_signatures, expect, list_of, member
from traincast.workload.program import Columns, Program
from traincast.workload.sizes import MONOMIALS, SizeTable
from traincast.workload.validate import validate_workload
from traincast.workload.workload import DEFAULT_TF32, Workload

FORMAT = "traincast-workload"
VERSION = 1  # rises by one with every change that an old reader could misunderstand
MAX_PROGRAMS = 1024  # of ranks that differ; chosen as a limit against damaged files


def save_workload(workload: Workload, path: str | Path) -> None:
    """Writes the workload as a `.tc` file: whole or not at all, and the same bytes for the same workload."""
    validate_workload(workload)
    if len(workload.programs) > MAX_PROGRAMS:
        raise TraincastError(
            f"workload '{workload.name}' has {len(workload.programs)} programs; a file holds {MAX_PROGRAMS}"
        )
    members = {"workload.json": json.dumps(_head(workload), separators=(",", ":"), allow_nan=False).encode()}
    for number, program in enumerate(workload.programs):
        for column in Columns.names():
            members[_member(number, column)] = pack_array(getattr(program.columns, column))
        for field in fields(SizeTable):
            members[_member(number, f"size_{field.name}")] = pack_array(getattr(program.sizes, field.name))
    write_bytes(path, pack(members))


def load_workload(path: str | Path) -> Workload:
    """Reads a `.tc` file and validates it."""
    try:
        archive = Archive(Path(path))
        head = _parse(archive.json_text("workload.json"))
        _check_version(head)
        workload = _workload(head, archive)
        validate_workload(workload)
    except TraincastError as error:
        raise TraincastError(f"{path}: {error}") from None
    return workload


def _member(program: int, column: str) -> str:
    return f"programs/{program}/{column}.npy"


def _head(workload: Workload) -> dict[str, Json]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": workload.name,
        "mode": workload.mode,
        "ranks": list(workload.ranks),
        "synchronised": workload.synchronised,
        "framework_version": workload.framework_version,
        "tf32": list(workload.tf32),
        "meta": dict(workload.meta),
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


def _parse(text: bytes) -> dict[str, Json]:
    return expect(parse_json(text, "workload.json"), dict, "the top level")


def _check_version(head: dict[str, Json]) -> None:
    if head.get("format") != FORMAT:
        raise TraincastError(f"is not a Traincast workload file (its format is {shown(head.get('format'))})")
    version = member(head, "version", int)
    if version > VERSION:
        raise TraincastError(
            f"written by a newer Traincast (format {shown(version)}); this one reads up to {VERSION}: upgrade"
        )
    if version < 1:
        raise TraincastError(f"format version {shown(version)} does not exist")


def _workload(head: dict[str, Json], archive: Archive) -> Workload:
    tables = list_of(member(head, "programs", list), dict, "'programs'")
    if len(tables) > MAX_PROGRAMS:
        raise TraincastError(f"has {len(tables)} programs; at most {MAX_PROGRAMS} can be read")
    meta = member(head, "meta", dict)
    workload = Workload(
        name=member(head, "name", str),
        programs=tuple([_program(table, number, archive) for number, table in enumerate(tables)]),
        ranks=tuple(list_of(member(head, "ranks", list), int, "'ranks'")),
        mode=member(head, "mode", str),
        synchronised=member(head, "synchronised", bool),
        framework_version=member(head, "framework_version", str),
        tf32=tuple(list_of(expect(head.get("tf32", list(DEFAULT_TF32)), list, "'tf32'"), str, "'tf32'")),
        meta={key: expect(value, str, f"meta {shown(key)}") for key, value in meta.items()},
    )
    per_program = (*Columns.names(), *(f"size_{field.name}" for field in fields(SizeTable)))
    known = {"workload.json", *(_member(n, column) for n in range(len(tables)) for column in per_program)}
    for name in sorted(archive.names - known):
        raise TraincastError(f"has a member {shown(name)} that does not belong to it")
    return workload


def _program(table: dict[str, Json], number: int, archive: Archive) -> Program:
    columns = {name: archive.array(_member(number, name), np.int32) for name in Columns.names()}
    coefficients = archive.array(_member(number, "size_coefficients"), np.int64, len(MONOMIALS))
    denominator, multiple = (
        archive.array(_member(number, f"size_{name}"), np.int64) for name in ("denominator", "seq_multiple")
    )
    return Program(
        sizes=SizeTable(coefficients, denominator, multiple),
        symbolic=decode_signatures(table),
        names=tuple(list_of(member(table, "names", list), str, "'names'")),
        columns=Columns(**columns),
        batch_size=member(table, "batch_size", int),
        seq_len=member(table, "seq_len", int),
        rigid=member(table, "rigid", str),
    )

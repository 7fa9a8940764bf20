"""Workloads on disk: a `.tc` file is a zip of `workload.json` and one integer array per column.

See docs/how-it-works/ir.md. Files are untrusted: loading gives a valid workload or one `TraincastError`.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np

from traincast.ir.archive import Archive, pack, pack_array
from traincast.ir.codec import Json, decode_signatures, encode_signatures, expect, list_of, member
from traincast.ir.formula import Formula
from traincast.ir.given import OpCost, costs_from
from traincast.ir.program import Columns, Program
from traincast.ir.sizes import MONOMIALS, SizeTable
from traincast.ir.validate import validate_workload
from traincast.ir.workload import DEFAULT_TF32, Workload
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.reading import parse_json
from traincast.utils.files.writing import write_bytes

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
    version = _version(workload)
    members = {"workload.json": json.dumps(_head(workload), separators=(",", ":"), allow_nan=False).encode()}
    for number, program in enumerate(workload.programs):
        for column in Columns.names():
            members[_member(number, column)] = pack_array(getattr(program.columns, column))
        for field in fields(SizeTable):
            held = getattr(program.sizes, field.name)
            if field.name == "coefficients" and version == 1:
                held = np.ascontiguousarray(held[:, :_MONOMIALS_OF_1])
            members[_member(number, f"size_{field.name}")] = pack_array(held)
    write_bytes(path, pack(members))


def _version(workload: Workload) -> int:
    """The oldest version that holds the workload: readers of that one understand it."""
    squared = any(np.any(program.sizes.coefficients[:, _MONOMIALS_OF_1:]) for program in workload.programs)
    return 2 if squared or workload.costs or workload.assumptions else 1


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
        "version": _version(workload),
        "name": workload.name,
        "mode": workload.mode,
        "ranks": list(workload.ranks),
        "synchronised": workload.synchronised,
        "framework_version": workload.framework_version,
        "tf32": list(workload.tf32),
        "meta": dict(workload.meta),
        **({"costs": {cost.op: dict(_saved(cost)) for cost in workload.costs}} if workload.costs else {}),
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


def _saved(cost: OpCost) -> dict[str, str]:
    """A cost as formulas."""
    for part, text in cost.as_text().items():
        if not isinstance(getattr(cost, part), Formula):
            raise TraincastError(f"{part} of {cost.op} is {text}, which a file cannot hold; give a formula instead")
    return cost.as_text()


def _parse(text: bytes) -> dict[str, Json]:
    return expect(parse_json(text, "workload.json"), dict, "the top level")


def _check_version(head: dict[str, Json]) -> None:
    if head.get("format") != FORMAT:
        raise TraincastError(f"is not a Traincast workload file (its format is {shorten_value(head.get('format'))})")
    version = member(head, "version", int)
    if version > VERSION:
        raise TraincastError(
            f"written by a newer Traincast (format {shorten_value(version)}); this one reads up to {VERSION}: upgrade"
        )
    if version < 1:
        raise TraincastError(f"format version {shorten_value(version)} does not exist")


def _workload(head: dict[str, Json], archive: Archive) -> Workload:
    version = member(head, "version", int)
    tables = list_of(member(head, "programs", list), dict, "'programs'")
    if len(tables) > MAX_PROGRAMS:
        raise TraincastError(f"has {len(tables)} programs; at most {MAX_PROGRAMS} can be read")
    meta = member(head, "meta", dict)
    workload = Workload(
        name=member(head, "name", str),
        programs=tuple([_program(table, number, archive, version) for number, table in enumerate(tables)]),
        ranks=tuple(list_of(member(head, "ranks", list), int, "'ranks'")),
        mode=member(head, "mode", str),
        synchronised=member(head, "synchronised", bool),
        framework_version=member(head, "framework_version", str),
        tf32=tuple(list_of(expect(head.get("tf32", list(DEFAULT_TF32)), list, "'tf32'"), str, "'tf32'")),
        costs=costs_from(expect(head.get("costs", {}), dict, "'costs'"), "'costs'"),
        assumptions=tuple(list_of(expect(head.get("assumptions", []), list, "'assumptions'"), str, "'assumptions'")),
        meta={key: expect(value, str, f"meta {shorten_value(key)}") for key, value in meta.items()},
    )
    per_program = (*Columns.names(), *(f"size_{field.name}" for field in fields(SizeTable)))
    known = {"workload.json", *(_member(n, column) for n in range(len(tables)) for column in per_program)}
    for name in sorted(archive.names - known):
        raise TraincastError(f"has a member {shorten_value(name)} that does not belong to it")
    return workload


def _coefficients(archive: Archive, member_name: str, version: int) -> IntArray:
    """Coefficients of sizes; files of version 1 have none of the batch size squared."""
    columns = _MONOMIALS_OF_1 if version == 1 else len(MONOMIALS)
    held = archive.array(member_name, np.int64, columns)
    return np.pad(held, ((0, 0), (0, len(MONOMIALS) - columns)))


def _program(table: dict[str, Json], number: int, archive: Archive, head_version: int) -> Program:
    columns = {name: archive.array(_member(number, name), np.int32) for name in Columns.names()}
    coefficients = _coefficients(archive, _member(number, "size_coefficients"), head_version)
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

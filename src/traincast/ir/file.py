"""Workloads on disk: a `.tc` file is a zip of `workload.json` and one integer array per column.

See docs/how-it-works/ir.md. Files are untrusted: loading gives a valid workload or one `TraincastError`.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np

from traincast.ir.archive import (
    Archive,
    Json,
    check_list_of,
    check_type,
    decode_signatures,
    encode_signatures,
    pack_array,
    pack_members,
    read_member,
)
from traincast.ir.formula import Formula, OpCost, read_op_costs
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

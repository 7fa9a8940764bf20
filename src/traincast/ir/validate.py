"""Whether a program is what it claims to be: every index in range, every count in agreement.

Runs on every load and save, so the checks are array operations; only a failure looks for its culprit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from traincast.ir.ops import DEVICES, DTYPE_BYTES, Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.program import Columns, Program
from traincast.ir.sizes import MONOMIALS, SizeRef
from traincast.ir.workload import MAX_BATCH, MAX_SEQ_LEN, TABLES, TF32_ARITHMETIC, Workload
from traincast.utils.arrays import BoolArray, Int32Array, IntArray
from traincast.utils.errors import TraincastError, shorten_value

_PER_OP = ("op_signature", "op_module", "op_forward", "op_stream")
_PER_SCOPE = ("scope_name", "scope_phase", "scope_thread", "scope_after")
_PER_STORAGE = ("storage_bytes", "storage_kind", "storage_alloc", "storage_free")
_MAX_SMALL = 1 << 16  # streams and threads are small numbers
_MAX_MULTIPLES = 64  # chosen as a limit against damaged files: kernels pad to few multiples
MAX_OPS = 1 << 18
"""Ops, scopes and storages of a program; the largest built-in step has 18 thousand."""
MAX_ALL_OPS = 1 << 19
"""Ops and scopes of all programs of a workload together: a prediction of this many takes about 15 seconds."""
MAX_RANKS = 1 << 16
"""Ranks of a workload: several times the GPUs of the largest training runs that were published."""
_MAX_TABLES = 1 << 24  # characters
MAX_NAME = 2000
"""Characters of a name or a note of a workload; the longest C++ kernel names have about 1,200."""
_MAX_ELEMENTS = 1 << 50  # of a tensor: a petabyte of bytes


def validate_workload(workload: Workload) -> None:
    """Raises a `TraincastError` that names the first thing wrong with the workload."""
    if not workload.programs:
        raise TraincastError("the workload has no program")
    tables = workload.meta.get(TABLES, "")
    check_names(
        (
            workload.name,
            workload.mode,
            *workload.meta,
            *(value for key, value in workload.meta.items() if key != TABLES),
        )
    )
    if len(tables) > _MAX_TABLES:
        raise TraincastError(f"its tables take {len(tables)} characters; more than {_MAX_TABLES} are not kept")
    for arithmetic in workload.tf32:
        if arithmetic not in TF32_ARITHMETIC:
            raise TraincastError(
                f"'tf32' names {shorten_value(arithmetic)}; it may name {' and '.join(TF32_ARITHMETIC)}"
            )
    if not workload.ranks:
        raise TraincastError("the workload has no rank")
    if len(workload.ranks) > MAX_RANKS:
        raise TraincastError(f"the workload has {len(workload.ranks)} ranks; at most {MAX_RANKS} are supported")
    if sum(max(part.num_ops, part.num_scopes) for part in workload.programs) > MAX_ALL_OPS:
        raise TraincastError(f"its programs have more than {MAX_ALL_OPS} ops or scopes together; capture fewer ranks")
    for rank, program in enumerate(workload.ranks):
        if not 0 <= program < len(workload.programs):
            raise TraincastError(f"rank {rank} runs program {program}, but there are {len(workload.programs)} programs")
    for number, part in enumerate(workload.programs):
        try:
            validate_program(part)
        except TraincastError as error:
            where = f"program {number}: " if len(workload.programs) > 1 else ""
            raise TraincastError(f"{where}{error}") from None
        if (part.batch_size, part.seq_len) != (workload.batch_size, workload.seq_len):
            raise TraincastError(
                f"program {number} has batch size {part.batch_size} and sequence length {part.seq_len}, "
                f"program 0 has {workload.batch_size} and {workload.seq_len}"
            )


def validate_program(program: Program) -> None:
    """Raises a `TraincastError` that names the first thing wrong with the program."""
    if not 1 <= program.batch_size <= MAX_BATCH:
        raise TraincastError(f"batch size {program.batch_size} is not from 1 to {MAX_BATCH}")
    if not 0 <= program.seq_len <= MAX_SEQ_LEN:
        raise TraincastError(f"sequence length {program.seq_len} is not from 0 to {MAX_SEQ_LEN}")
    if max(program.num_ops, program.num_scopes, len(program.columns.storage_bytes)) > MAX_OPS:
        raise TraincastError(f"the program has more than {MAX_OPS} ops, scopes or storages; capture a smaller step")
    check_names(program.names)
    _check_sizes(program)
    check_structure(program)
    _require(program.storage_nbytes >= 0, "storage {i} has a negative number of bytes")
    _check_signatures(program)
    _check_counts(program)


def check_structure(program: Program) -> None:
    """Rejects columns that do not fit each other, whatever the sizes; a fraction of the work of `validate`."""
    _check_lengths(program.columns)
    _check_pointers(program.columns)
    _check_ranges(program)
    _check_order(program)


def check_names(names: Iterable[str]) -> None:
    """Rejects names that would forge lines of a report or never end."""
    for name in names:
        if len(name) > MAX_NAME or not name.isprintable():
            raise TraincastError(
                f"the name {shorten_value(name)} is not a printable text of at most {MAX_NAME} characters"
            )


def _check_sizes(program: Program) -> None:
    table = program.sizes
    rows = len(table)
    if (table.coefficients.shape, table.seq_multiple.shape) != ((rows, len(MONOMIALS)), (rows,)):
        raise TraincastError(
            f"the size table has coefficients of shape {table.coefficients.shape}, "
            f"{rows} denominators and {len(table.seq_multiple)} multiples"
        )
    _require(table.denominator >= 1, "size {i} has a denominator below 1")
    _require((table.seq_multiple >= 1) & (table.seq_multiple <= MAX_SEQ_LEN), "size {i} has an impossible multiple")
    if len(np.unique(table.seq_multiple)) > _MAX_MULTIPLES:
        raise TraincastError(f"the size table pads sequences in more than {_MAX_MULTIPLES} ways")
    assert len(program.size_values) == len(table)


def _check_lengths(c: Columns) -> None:
    for group in (_PER_OP, _PER_SCOPE, _PER_STORAGE):
        for name in group:
            if getattr(c, name).shape != getattr(c, group[0]).shape:
                raise TraincastError(
                    f"column {name} has {len(getattr(c, name))} entries, {group[0]} has {len(getattr(c, group[0]))}"
                )


def _check_pointers(c: Columns) -> None:
    ops = len(c.op_signature)
    for name, things, end in (
        ("input_ptr", ops, len(c.input_tensor)),
        ("output_ptr", ops, len(c.output_tensor)),
        ("scope_ptr", len(c.scope_name), ops),
    ):
        pointer: Int32Array = getattr(c, name)
        if len(pointer) != things + 1:
            raise TraincastError(f"column {name} has {len(pointer)} entries, not {things + 1}")
        if pointer[0] != 0 or pointer[-1] != end:
            raise TraincastError(f"column {name} runs from {pointer[0]} to {pointer[-1]}, not from 0 to {end}")
        _require(pointer[1:] >= pointer[:-1], f"column {name} falls after entry {{i}}")


def _check_ranges(program: Program) -> None:
    c = program.columns
    ops, scopes, tensors = program.num_ops, program.num_scopes, len(c.tensor_storage)
    for name, low, high in (
        ("op_signature", 0, len(program.symbolic)),
        ("op_module", 0, len(program.names)),
        ("op_forward", -1, ops),
        ("op_stream", 0, _MAX_SMALL),
        ("input_tensor", 0, tensors),
        ("output_tensor", 0, tensors),
        ("tensor_storage", 0, len(c.storage_bytes)),
        ("storage_bytes", 0, len(program.sizes)),
        ("storage_kind", 0, len(StorageKind)),
        ("storage_alloc", -1, ops + 1),
        ("storage_free", -1, ops + 1),
        ("scope_name", 0, len(program.names)),
        ("scope_phase", 0, len(Phase)),
        ("scope_thread", 0, _MAX_SMALL),
        ("scope_after", -1, scopes),
    ):
        column: Int32Array = getattr(c, name)
        if len(column) and not (column.min() >= low and column.max() < high):
            at = int(np.flatnonzero((column < low) | (column >= high))[0])
            raise TraincastError(f"column {name} is {column[at]} at entry {at}, not from {low} to {high - 1}")


def _check_order(program: Program) -> None:
    c = program.columns
    _require(c.storage_alloc <= c.storage_free, "storage {i} is freed before it is allocated")
    _require(
        c.op_forward < np.arange(program.num_ops),
        "op {i}{name} has a forward op that comes after it",
        program,
    )
    _require(c.scope_after < np.arange(program.num_scopes), "scope {i} waits for a scope that comes after it")


def _check_counts(program: Program) -> None:
    """Every op has as many tensors as its signature says."""
    c = program.columns
    for what, pointer in (("inputs", c.input_ptr), ("outputs", c.output_ptr)):
        expected = np.array([len(getattr(s, what)) for s in program.symbolic], dtype=np.int64)
        actual = np.diff(pointer)
        wrong = np.flatnonzero(actual != expected[c.op_signature])
        if len(wrong):
            op = int(wrong[0])
            raise TraincastError(
                f"op {op}{_name_op(op, program)} has {actual[op]} {what}, its signature {expected[c.op_signature[op]]}"
            )


def _check_signatures(program: Program) -> None:
    """One fast look at all signatures together; if anything is wrong, one by one to name the culprit."""
    if not _find_signature_problem(program.symbolic, program.size_values):
        return
    for number, signature in enumerate(program.symbolic):
        problem = _find_signature_problem((signature,), program.size_values)
        if problem:
            users = np.flatnonzero(program.columns.op_signature == number)
            where = f"op {users[0]}" if len(users) else f"signature {number}"
            raise TraincastError(f"{where} ({signature.name!r:.80}) {problem}")


def _find_signature_problem(signatures: Iterable[Signature], sizes: IntArray) -> str:
    """What is wrong with these signatures, or ""."""
    specs: dict[int, TensorSpec] = {}
    scalars: list[int] = []
    for s in signatures:
        if not s.name.isprintable() or len(s.name) > MAX_NAME:
            return "has a name that is not printable"
        specs.update({id(spec): spec for spec in (*s.inputs, *s.outputs)})
        for _, value in s.scalars:
            _collect_sizes_of(value, scalars)
        if s.groups and (sum(n for _, n in s.groups) != len(s.inputs) or min(n for _, n in s.groups) < 0):
            return f"groups {sum(n for _, n in s.groups)} tensors but has {len(s.inputs)} inputs"
    lengths: list[int] = list(scalars)
    extents: list[int] = []
    for spec in specs.values():
        if spec.dtype not in DTYPE_BYTES:
            return f"has a tensor of unknown dtype {spec.dtype!r:.60}"
        if spec.device not in DEVICES:
            return f"has a tensor on unknown device {spec.device!r:.60}; known are {', '.join(DEVICES)}"
        if len(spec.shape) != len(spec.stride):
            return f"has a tensor with {len(spec.shape)} dimensions and {len(spec.stride)} strides"
        extents += spec.shape
        extents += spec.stride
    lengths += extents
    if lengths and not (min(lengths) >= 0 and max(lengths) < len(sizes)):
        return f"refers to a size that is not in the table of {len(sizes)}"
    if extents and sizes[extents].min() < 0:
        return "has a tensor with a negative size or stride"
    if any(_count_elements(spec, sizes) > _MAX_ELEMENTS for spec in specs.values()):
        return f"has a tensor of more than {_MAX_ELEMENTS} elements"
    return ""


def _count_elements(spec: TensorSpec, sizes: IntArray) -> int:
    return math.prod(sizes[list(spec.shape)].tolist())


def _collect_sizes_of(value: Scalar, into: list[int]) -> None:
    if isinstance(value, SizeRef):
        into.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _collect_sizes_of(item, into)


def _require(good: BoolArray, message: str, program: Program | None = None) -> None:
    if not good.all():
        at = int(np.argmin(good))
        raise TraincastError(message.format(i=at, name=_name_op(at, program) if program else ""))


def _name_op(op: int, program: Program) -> str:
    return f" ({program.symbolic[program.columns.op_signature[op]].name!r:.80})"

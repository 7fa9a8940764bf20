"""Edits of the tables of a captured step, whether each is looked up by ops of its own or all by one table-batched
op."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from traincast.ir.ops import Scalar, Signature
from traincast.ir.program import Program
from traincast.ir.rows import OpRow
from traincast.ir.sizes import SizeRef
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.transforms.pruning import Resizing
from traincast.transforms.tables import (
    ADDED,
    DROPPED,
    add_own_table,
    check_step,
    drop_own_tables,
    make_no_tables_error,
    pick_table,
    resize_own_tables,
)
from traincast.utils.errors import TraincastError

_FORWARD = re.compile(
    r"fbgemm::split_embedding_codegen_forward_(un)?weighted_cuda|traincast::batched_embedding_forward"
)  # fmt: skip
_DENSE = "fbgemm::dense_embedding_codegen_forward"
_UPDATE = re.compile(r"fbgemm::split_embedding_backward_codegen_\w+_cuda|traincast::batched_embedding_backward_\w+")
_CHECK = "fbgemm::bounds_check_indices"
_OF_WEIGHTS = "fbgemm::split_embedding_codegen_grad_indice_weights_cuda"
"""Gradients of the weights of lookups, as many as there are lookups."""
_WEIGHTS = ("dev_weights", "weights")
_BY_TABLE = {"D_offsets": 1, "weights_offsets": 0, "table_offsets": 0, "rows_per_table": 0}
"""Operands with a number for every table, and how many they have besides."""


@dataclass(frozen=True, kw_only=True)
class BatchedTable:
    """One of several tables: `rows` high, of which `held` are on the device, `dim` wide, looked up so often by every
    bag."""

    rows: int
    held: int
    dim: int
    lookups: Fraction


@dataclass(eq=False, slots=True)
class BatchedTables:
    """The tables of one table-batched op; `others` are its update and the check of its lookups."""

    module: str
    lookup: OpRow
    tables: tuple[BatchedTable, ...]
    others: list[OpRow]


def looks_up_together(step: Workload) -> bool:
    """Whether tables of a step are looked up by table-batched ops."""
    names = {signature.name for program in step.programs for signature in program.symbolic}
    return any(_FORWARD.fullmatch(name) or name.startswith(_DENSE) for name in names)


def find_batched_modules(step: Resizing) -> list[BatchedTables]:
    """The table-batched lookups of a step in their order."""
    found: dict[int, BatchedTables] = {}
    for op in step.editor.ops:
        if op.signature.name.startswith(_DENSE):
            raise TraincastError("its tables have gradients as large as they are; capture the changed model")
        if _FORWARD.fullmatch(op.signature.name):
            weights = step.storage(op, *_WEIGHTS)
            if weights in found:
                raise TraincastError("its tables are looked up by several ops; capture the changed model")
            found[weights] = BatchedTables(step.program.names[op.module], op, _read_tables(step, op), [])
    for op in step.editor.ops:
        of_tables = op.signature.name == _OF_WEIGHTS or _UPDATE.fullmatch(op.signature.name)
        if of_tables and (mine := found.get(step.storage(op, *_WEIGHTS))):
            mine.others.append(op)
        elif op.signature.name == _CHECK:
            for one in found.values():
                same = step.storage(op, "indices") == step.storage(one.lookup, "indices")
                one.others += [op] if same else []
    return list(found.values())


def _read_tables(step: Resizing, op: OpRow) -> tuple[BatchedTable, ...]:
    signature, values = op.signature, step.values
    if signature.scalar("load") is not None:
        raise TraincastError("its tables are told by their load alone; describe the model in YAML")
    row_counts, dims = _read_numbers(signature, "rows", values), _read_numbers(signature, "dims", values)
    if not row_counts or len(row_counts) != len(dims):
        raise TraincastError("it does not say how high each of its tables is; capture it again")
    bags = values[signature.outputs[0].shape[0]]
    (indices,), (offsets,) = signature.tensors("indices"), signature.tensors("offsets")
    if values[offsets.shape[0]] != bags * len(dims) + 1:
        raise TraincastError("its rows are not added up by sample; capture the changed model")
    known = _read_numbers(signature, "pooling", values)
    even = Fraction(values[indices.shape[0]], bags * len(dims))
    lookups = [Fraction(n) for n in known] if len(known) == len(dims) else [even] * len(dims)
    form = step.form(step.storage(op, *_WEIGHTS))
    whole = signature.scalar("pooling_mode") is not None  # FBGEMM's own: all rows are there
    held = _count_rows_on_device(row_counts, dims if len(form) == 1 else (1,) * len(dims), form[0], whole=whole)
    return tuple(
        BatchedTable(rows=rows, held=here, dim=dim, lookups=often)
        for rows, here, dim, often in zip(row_counts, held, dims, lookups, strict=True)
    )


def _read_numbers(signature: Signature, name: str, values: Sequence[int]) -> tuple[int, ...]:
    value = signature.scalar(name)
    return tuple(values[item] for item in value if isinstance(item, SizeRef)) if isinstance(value, tuple) else ()


def _count_rows_on_device(row_counts: Sequence[int], widths: Sequence[int], memory: int, *, whole: bool) -> list[int]:
    """Rows of each table that are on the device: all, or of higher tables no more than a common limit."""
    low, high = 0, max(row_counts)
    while low < high and not whole:
        middle = (low + high) // 2
        enough = sum(min(rows, middle) * width for rows, width in zip(row_counts, widths, strict=True)) >= memory
        low, high = (low, middle) if enough else (middle + 1, high)
    held = [min(rows, high) for rows in row_counts]
    if sum(rows * width for rows, width in zip(held, widths, strict=True)) != memory:
        raise TraincastError("some of its lookups share a table, or rows are elsewhere; capture the changed model")
    return held


def write_tables(step: Resizing, module: BatchedTables, tables: Sequence[BatchedTable]) -> None:
    """Puts other tables in the place of those of a module; its result keeps its width."""
    ops = (module.lookup, *module.others)
    for op in ops:
        step.allow_op(op)
    row_counts = {
        _count_elements(module.tables): _count_elements(tables),
        _count_rows(module.tables): _count_rows(tables),
    }
    more = sum((one.lookups for one in tables), Fraction(0)) / sum((one.lookups for one in module.tables), Fraction(0))
    if more != 1 and any(op.signature.name == _OF_WEIGHTS for op in ops):
        raise TraincastError("the weights of its lookups have gradients; capture the changed model")
    ends = step.sizes.total([module.lookup.signature.outputs[0].shape[0]], times=len(tables), plus=1)
    for op in ops:
        for name, storage in step.list_named_operands(op):
            height = step.form(storage)[0] if step.form(storage) else 0
            of_lookups = name in ("indices", "indice_weights") or (name == "weights" and op.signature.name == _CHECK)
            if not of_lookups and (name in _WEIGHTS or (name.startswith("momentum") and height in row_counts)):
                step.set_height(storage, row_counts[height])
            elif name in _BY_TABLE:
                step.set_height(storage, len(tables) + _BY_TABLE[name])
            elif of_lookups:
                step.scale(storage, more)
            elif name == "offsets" and len(tables) != len(module.tables):
                step.resize(storage, lambda _: ends)
        op.signature = _update_arguments(op.signature, module, tables, step)


def _count_elements(tables: Sequence[BatchedTable]) -> int:
    return sum(one.held * one.dim for one in tables)


def _count_rows(tables: Sequence[BatchedTable]) -> int:
    return sum(one.held for one in tables)


def _update_arguments(
    signature: Signature, module: BatchedTables, tables: Sequence[BatchedTable], step: Resizing
) -> Signature:
    """What an op is told of its tables."""

    def numbers(values: Sequence[int]) -> Scalar:
        return tuple(SizeRef(step.sizes.constant(value)) for value in values)

    widest = max(one.dim for one in module.tables)
    told: dict[str, Scalar] = {
        "rows": numbers([one.rows for one in tables]),
        "dims": numbers([one.dim for one in tables]),
        "pooling": numbers([int(one.lookups) for one in tables]),
        "total_rows": SizeRef(step.sizes.constant(_count_elements(tables) // widest)),
    }
    return replace(signature, scalars=tuple((name, told.get(name, value)) for name, value in signature.scalars))


Change = Callable[[Fraction], int]
"""From an old number to a new one."""


def drop_tables(step: Workload, texts: Sequence[str]) -> tuple[Workload, str]:
    """The step without some tables."""
    check_step(step)
    if not looks_up_together(step):
        return drop_own_tables(step, texts)
    resizing, modules = _open_step(step)
    known = _name_tables(modules)
    forms = [f"{one.rows} x {one.dim}" for module in modules for one in module.tables]
    gone = {list(known.values())[pick_table(text, list(known), forms)] for text in texts}
    for module in modules:
        left = [table for number, table in enumerate(module.tables) if (id(module), number) not in gone]
        if not left:
            raise TraincastError(
                f"{_get_module_name(module)} has {len(module.tables)} tables, and one of them must stay"
            )
        if len(left) < len(module.tables):
            write_tables(resizing, module, left)
    names = [name for name, key in known.items() if key in gone]
    return _write_step(step, resizing), DROPPED.format(" and ".join(names))


def add_table(step: Workload, rows: int, lookups: int) -> tuple[Workload, str]:
    """The step with a table of this many rows, looked up so often per sample."""
    check_step(step)
    if not looks_up_together(step):
        return add_own_table(step, rows, lookups)
    resizing, modules = _open_step(step)
    module = modules[-1]
    *first, last = module.tables
    larger = replace(last, rows=last.rows + rows, held=last.held + rows, lookups=last.lookups + lookups)
    write_tables(resizing, module, [*first, larger])
    return _write_step(step, resizing), ADDED.format(list(_name_tables([module]))[-1])


def set_lookups(step: Workload, change: Change) -> tuple[Workload, str]:
    """The step with other numbers of lookups of every bag."""
    check_step(step)
    if not looks_up_together(step):
        raise TraincastError(
            "its rows are looked up by an op for each table, or it has none; describe the model in YAML, or capture "
            "the changed one"
        )
    resizing, modules = _open_step(step)
    for module in modules:
        write_tables(resizing, module, [replace(one, lookups=Fraction(change(one.lookups))) for one in module.tables])
    return _write_step(step, resizing), ""


def set_row_counts(step: Workload, change: Change) -> tuple[Workload, str]:
    """The step with tables of other heights, those of every rank; rows that were not on the device are not there
    either."""
    check_follows_tensors(step)
    known: dict[int, Program] = {}
    found = 0
    for program in step.programs:
        if id(program) in known:
            continue
        resizing = Resizing(program)
        modules = find_batched_modules(resizing)
        for module in modules:
            write_tables(resizing, module, [_set_table_rows(one, change(Fraction(one.rows))) for one in module.tables])
        found += len(modules) + resize_own_tables(resizing, change)
        known[id(program)] = resizing.build()
    if not found:
        raise make_no_tables_error(step)
    return replace(step, programs=tuple(known[id(program)] for program in step.programs)), ""


def _set_table_rows(table: BatchedTable, rows: int) -> BatchedTable:
    return replace(table, rows=rows, held=rows if table.held == table.rows else min(table.held, rows))


def _open_step(step: Workload) -> tuple[Resizing, list[BatchedTables]]:
    resizing = Resizing(step.programs[0])
    return resizing, find_batched_modules(resizing)


def _write_step(step: Workload, resizing: Resizing) -> Workload:
    return replace(step, programs=(resizing.build(),))


def _get_module_name(module: BatchedTables) -> str:
    return module.module or "the module of its tables"


def _name_tables(modules: Sequence[BatchedTables]) -> dict[str, tuple[int, int]]:
    """Every table by the path of its module and its number in it."""
    return {
        f"{module.module or 'tables'}.{number}": (id(module), number)
        for module in modules
        for number in range(len(module.tables))
    }

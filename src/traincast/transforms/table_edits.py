"""Edits of the tables of a captured step, whether each is looked up by ops of its own or all by one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from traincast.ir.workload import Workload
from traincast.transforms.adding import ADDED, add_own_table
from traincast.transforms.batched_tables import (
    BatchedTable,
    BatchedTables,
    find_batched_modules,
    looks_up_together,
    write_tables,
)
from traincast.transforms.resizing import Resizing
from traincast.transforms.tables import DROPPED, check_step, drop_own_tables, pick_table
from traincast.utils.errors import TraincastError

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

    def changed(module: BatchedTables) -> list[BatchedTable]:
        return [replace(one, lookups=Fraction(change(one.lookups))) for one in module.tables]

    return _edit_each_module(step, changed, "its rows are looked up by an op for each table")


def set_row_counts(step: Workload, change: Change) -> tuple[Workload, str]:
    """The step with tables of other heights; rows that were not on the device are not there either."""

    def changed(module: BatchedTables) -> list[BatchedTable]:
        return [_set_table_rows(one, change(Fraction(one.rows))) for one in module.tables]

    return _edit_each_module(step, changed, "its tables are looked up by an op each")


def _set_table_rows(table: BatchedTable, rows: int) -> BatchedTable:
    return replace(table, rows=rows, held=rows if table.held == table.rows else min(table.held, rows))


def _edit_each_module(
    step: Workload, changed: Callable[[BatchedTables], list[BatchedTable]], alone: str
) -> tuple[Workload, str]:
    check_step(step)
    if not looks_up_together(step):
        raise TraincastError(f"{alone}, or it has none; describe the model in YAML, or capture the changed one")
    resizing, modules = _open_step(step)
    for module in modules:
        write_tables(resizing, module, changed(module))
    return _write_step(step, resizing), ""


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

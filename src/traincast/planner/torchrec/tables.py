"""TorchRec table configs as JSON of their fields, to and from `Table`; untrusted JSON, where every complaint names the
field.

A description is `{"modules": {path: {"is_weighted": false, "tables": [config, ...]}}}`, or a bare list of configs. A
config has the fields of `EmbeddingBagConfig` or `EmbeddingConfig`, enums by their names. What these lack and a step
depends on may stand alongside them: `pooling_factors` as in TorchRec's `ParameterConstraints`, and under `traincast`
the fields `pooling`, `access` and `optimizer` of a table set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from traincast.models.embeddings.access import Access, Reuse, format_access
from traincast.models.embeddings.documents import list_module_entries
from traincast.models.embeddings.read import MAX_TABLES, make_table
from traincast.models.embeddings.table import Table, check_tables
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import read_document


def shorten_name(name: str) -> str:
    """A name for a message: short, on one line."""
    return repr(name[:80])[1:-1]


def check_mapping(value: Any, where: str, allowed: Iterable[str] | None = None) -> Mapping[str, Any]:
    """A JSON object, with no other keys than those allowed."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TraincastError(f"{where} is {shorten_value(value)}; give an object")
    names = None if allowed is None else tuple(allowed)
    for key in value if names is not None else ():
        if names is not None and key not in names:
            raise make_unknown_error("field", shorten_name(key), names, f"{where} may have {', '.join(names)}.")
    return value


def check_sequence(value: Any, where: str, most: int) -> Sequence[Any]:
    """A JSON list of at most `most` items."""
    if not isinstance(value, list | tuple):
        raise TraincastError(f"{where} is {shorten_value(value)}; give a list")
    if len(value) > most:
        raise TraincastError(f"{where} has {len(value)} items; at most {most} are read")
    return value


def check_text(value: Any, where: str) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise TraincastError(f"{where} is {shorten_value(value)}; give a text")
    return value


def check_integer(value: Any, where: str, least: int, most: int) -> int:
    """An integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraincastError(f"{where} is {shorten_value(value)}; give an integer")
    if not least <= value <= most:
        raise TraincastError(f"{where} is {shorten_value(value)}; give an integer from {least} to {most}")
    return value


def check_number(value: Any, where: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TraincastError(f"{where} is {shorten_value(value)}; give a number")
    try:
        result = float(value)
    except OverflowError:
        result = float("inf")
    if not isfinite(result):
        raise TraincastError(f"{where} is {shorten_value(value)}; give a finite number")
    return result


def check_choice(value: Any, where: str, choices: Iterable[str]) -> str:
    """One of the choices."""
    names = tuple(choices)
    if not isinstance(value, str) or value not in names:
        word = shorten_name(value) if isinstance(value, str) else shorten_value(value)
        raise make_unknown_error(where, word, names, f"Choose {', '.join(names)}.")
    return value


DEFAULT_MODULE = "embedding_bag_collection"
WEIGHTED_MODULE = "weighted_embedding_bag_collection"
DATA_TYPES = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16"}


@dataclass(frozen=True, slots=True)
class ModuleTables:
    """The tables of a model, and for each the path of the module that owns it."""

    tables: tuple[Table, ...]
    paths: tuple[str, ...]

    @property
    def modules(self) -> dict[str, str]:
        """Path of the module that owns each table, by the table's name."""
        return {table.name: path for table, path in zip(self.tables, self.paths, strict=True)}


def load_tables_json(path: Path) -> ModuleTables:
    """The tables that a JSON file describes."""
    try:
        return tables_from_json(read_document(path), folder=path.parent)
    except TraincastError as error:
        raise TraincastError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def tables_from_json(content: Any, *, folder: Path = Path()) -> ModuleTables:
    """The tables that parsed JSON describes; files of raw indices are looked for in `folder`."""
    if isinstance(content, list):
        content = {"modules": {DEFAULT_MODULE: {"tables": content}}}
    if not isinstance(content, Mapping) or set(content) != {"modules"}:
        raise TraincastError(f"the description is {shorten_value(content)}; give `modules`, or a list of tables")
    tables: list[Table] = []
    paths: list[str] = []
    try:
        for path, entry in list_module_entries(content["modules"], "the description"):
            if len(tables) == MAX_TABLES:
                raise TraincastError(f"more than {MAX_TABLES} tables; split the set")
            tables.append(make_table(entry, f"table {len(tables) + 1}", folder))
            paths.append(path)
        return ModuleTables(check_tables(tables), tuple(paths))
    except TraincastError as error:  # it may quote a name with line breaks
        raise TraincastError(" ".join(str(error).split())) from error


def tables_to_json(tables: Sequence[Table], modules: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The description of these tables. A module holds tables with weighted lookups, or without, not both.

    `modules` says the path of the module that owns each table; without it there is one for each of the two.
    """
    paths = default_modules(tables) if modules is None else modules
    written: dict[str, dict[str, Any]] = {}
    for table in check_tables(tables):
        module = written.setdefault(paths[table.name], {"is_weighted": table.weighted, "tables": []})
        if module["is_weighted"] != table.weighted:
            raise TraincastError(
                f"table '{table.name}' and others of module '{paths[table.name]}' differ in weighted lookups; "
                "a module has only one kind"
            )
        module["tables"].append(_write_config(table))
    return {"modules": written}


def default_modules(tables: Sequence[Table]) -> dict[str, str]:
    """A module for tables without weighted lookups, and one for those with."""
    return {table.name: WEIGHTED_MODULE if table.weighted else DEFAULT_MODULE for table in tables}


def _write_config(table: Table) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in DATA_TYPES.items()}
    pooling: Any = {"lengths": list(table.pooling.lengths), "shares": list(table.pooling.shares)}
    if table.pooling.shares == (1.0,):
        pooling = table.pooling.lengths[0]
    return {
        "name": table.name,
        "num_embeddings": table.rows,
        "embedding_dim": table.dim,
        "data_type": names[table.dtype],
        "feature_names": [table.name],
        "pooling": "SUM",
        "traincast": {"pooling": pooling, "access": _write_access(table.access), "optimizer": table.optimizer},
    }


def _write_access(access: Access) -> Any:
    if not isinstance(access, Reuse):
        return format_access(access)
    histogram = access.histogram
    return {
        "reuse": {
            "lookups": histogram.lookups,
            "unique_rows": histogram.unique_rows,
            "row_shares": list(histogram.row_shares),
            "access_shares": list(histogram.access_shares),
            "precision": histogram.precision,
        }
    }

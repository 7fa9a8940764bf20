"""TorchRec table configs as JSON of their fields, to and from `Table`. Needs no TorchRec.

A description is `{"modules": {path: {"is_weighted": false, "tables": [config, ...]}}}`, or a bare list of configs. A
config has the fields of `EmbeddingBagConfig` or `EmbeddingConfig`, enums by their names. What these lack and a step
depends on may stand alongside them: `pooling_factors` as in TorchRec's `ParameterConstraints`, and under `traincast`
the fields `pooling`, `access` and `optimizer` of a table set.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traincast.models.embeddings.access import Access, Reuse, format_access
from traincast.models.embeddings.read import MAX_TABLES, make_table
from traincast.models.embeddings.table import MAX_DIM, MAX_POOLING, MAX_ROWS, Table, check_tables
from traincast.planner.torchrec.fields import (
    check_choice,
    check_flag,
    check_integer,
    check_mapping,
    check_number,
    check_sequence,
    check_text,
    shorten_name,
)
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import read_document

DEFAULT_MODULE = "embedding_bag_collection"
WEIGHTED_MODULE = "weighted_embedding_bag_collection"
DATA_TYPES = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16"}
_POOLINGS = ("SUM", "MEAN", "NONE")
_OURS = ("pooling", "access", "optimizer")
# none of these changes which bytes a training step moves
_HARMLESS = (
    "weight_init_max", "weight_init_min", "init_fn", "need_pos", "num_embeddings_post_pruning", "input_dim",
    "enable_embedding_update", "stash_weights",
)  # fmt: skip
_UNREAD = ("total_num_buckets", "use_virtual_table", "virtual_table_eviction_policy")
_CONFIG = (
    "name", "num_embeddings", "embedding_dim", "data_type", "feature_names", "pooling", "pooling_factors", "traincast",
    *_HARMLESS, *_UNREAD,
)  # fmt: skip


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
    modules = check_mapping(check_mapping(content, "the description", ("modules",)).get("modules"), "'modules'")
    tables: list[Table] = []
    paths: list[str] = []
    for path, module in modules.items():
        fields = check_mapping(module, f"module '{shorten_name(path)}'", ("is_weighted", "tables"))
        weighted = check_flag(fields.get("is_weighted", False), f"module '{shorten_name(path)}': is_weighted")
        most = MAX_TABLES - len(tables)
        for config in check_sequence(fields.get("tables"), f"module '{shorten_name(path)}': tables", most):
            tables.append(_read_table(config, len(tables) + 1, weighted, folder))
            paths.append(path)
    return ModuleTables(check_tables(tables), tuple(paths))


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


def _read_table(entry: Any, position: int, weighted: bool, folder: Path) -> Table:
    fields = check_mapping(entry, f"table {position}", _CONFIG)
    where = f"table '{shorten_name(check_text(fields.get('name'), f'name of table {position}'))}'"
    for name in ("num_embeddings", "embedding_dim"):
        if name not in fields:
            raise TraincastError(f"{where}: no {name}; give one")
    for name in _UNREAD:
        if fields.get(name) not in (None, False):
            raise TraincastError(f"{where}: {name} {reprlib.repr(fields[name])} cannot be represented; leave it out")
    ours = dict(check_mapping(fields.get("traincast", {}), f"{where}: traincast", _OURS))
    _read_pooling(fields, ours, where)
    entry = {
        "name": fields["name"],
        "rows": check_integer(fields["num_embeddings"], f"{where}: num_embeddings", 1, MAX_ROWS),
        "dim": check_integer(fields["embedding_dim"], f"{where}: embedding_dim", 1, MAX_DIM),
        "dtype": DATA_TYPES[
            check_choice(_read_enum(fields.get("data_type", "FP32")), f"data_type of {where}", DATA_TYPES)
        ],
        "weighted": weighted,
        **ours,
    }
    try:
        return make_table(entry, f"table {position}", folder)
    except TraincastError as error:  # it may quote a name with line breaks
        raise TraincastError(" ".join(str(error).split())) from error


def _read_pooling(fields: Mapping[str, Any], ours: dict[str, Any], where: str) -> None:
    """Checks what the config says of features and pooling, and adds the mean to our own fields."""
    features = check_sequence(fields.get("feature_names", ["?"]), f"{where}: feature_names", MAX_TABLES)
    for feature in features:
        check_text(feature, f"{where}: feature_names")
    if len(features) != 1:
        raise TraincastError(f"{where} serves {len(features)} features; only tables of one feature can be represented")
    factors = fields.get("pooling_factors")
    if factors is not None:
        values = check_sequence(factors, f"{where}: pooling_factors", MAX_TABLES)
        if len(values) != 1:
            raise TraincastError(f"{where}: {len(values)} pooling_factors for one feature; give one")
        if "pooling" in ours:
            raise TraincastError(f"{where}: both pooling_factors and pooling under traincast; give one of them")
        mean = check_number(values[0], f"{where}: pooling_factors")
        if not 0 <= mean <= MAX_POOLING:
            raise TraincastError(f"{where}: pooling_factors {mean:g}; give a number from 0 to {MAX_POOLING}")
        ours["pooling"] = mean
    if check_choice(_read_enum(fields.get("pooling", "SUM")), f"pooling of {where}", _POOLINGS) != "NONE":
        return
    if ours.get("pooling", 1) != 1:
        raise TraincastError(
            f"{where}: pooling NONE with more than one lookup a sample; sequences of rows cannot be represented yet"
        )


def _read_enum(value: Any) -> Any:
    """The name of an enum's member, whether or not its class stands before it."""
    return value.rpartition(".")[2] if isinstance(value, str) else value


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

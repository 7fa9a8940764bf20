"""A DLRM described in a short YAML file, checked field by field, and the step written from it."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from traincast.ir.editor import remove_phase
from traincast.ir.ops import Phase
from traincast.ir.workload import MAX_BATCH, Workload
from traincast.models.dlrm.config import (
    DLRM_V2,
    EMBEDDINGS,
    INDEX_DTYPES,
    INTERACTIONS,
    LOSSES,
    OPTIMIZERS,
    STUDY_DLRMS,
    DlrmConfig,
)
from traincast.models.embeddings.access import Uniform, format_access
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import format_path, parse_yaml, read_text

MAX_BYTES = 1 << 20
MAX_TABLES = 10_000
MAX_LAYERS = 100
MAX_WIDTH = 1 << 20
MAX_ROWS = 1 << 34
MAX_LOOKUPS = 1 << 16
MAX_TABLE_BYTES = 1 << 60

_LARGEST = {
    "bottom_mlp": MAX_WIDTH, "top_mlp": MAX_WIDTH, "embedding_dim": 1 << 16, "num_tables": MAX_TABLES,
    "rows_per_table": MAX_ROWS, "resident_rows": MAX_ROWS, "lookups_per_table": MAX_LOOKUPS, "batch_size": MAX_BATCH,
}  # fmt: skip

_REQUIRED = ("bottom_mlp", "top_mlp", "rows_per_table", "embedding_dim", "lookups_per_table")
_CHOICES = {
    "interaction": INTERACTIONS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "embedding": EMBEDDINGS,
    "index_dtype": INDEX_DTYPES,
}
_FIELDS = (*(field.name for field in fields(DlrmConfig)), "num_tables")


def load_dlrm_yaml(
    path: str | Path,
    *,
    mode: str = "training",
    optimizer: str | None = None,
    precision: str = "fp32",
    embedding: str | None = None,
) -> Workload:
    """The workload of the DLRM described in a YAML file; `optimizer` and `embedding` override the file's own.

    `optimizer` may be "none": the step without its update. Mixed precision needs a capture.
    """
    config = read_dlrm(path)
    if mode not in ("training", "inference"):
        raise make_unknown_error("mode", mode, ("training", "inference"), "Choose training or inference.")
    if precision not in ("fp32", "tf32"):
        raise TraincastError(
            f"a DLRM from YAML runs in fp32 or tf32, not {precision}; capture the model for {precision}"
        )
    drop = optimizer == "none"
    if optimizer is not None and not drop:
        config = replace(config, optimizer=_read_choice("optimizer", optimizer, OPTIMIZERS))
    if embedding is not None:
        config = replace(config, embedding=_read_choice("embedding", embedding, EMBEDDINGS))
    from traincast.models.dlrm.program import build_dlrm_workload  # its limits are read more often than steps written

    workload = build_dlrm_workload(config, mode=mode)
    return remove_phase(workload, Phase.OPTIMIZER) if drop else workload


def read_dlrm(path: str | Path) -> DlrmConfig:
    """The DLRM of a YAML file; its name is the file's unless it says another."""
    file = Path(path)
    text = read_text(file, most=MAX_BYTES)
    try:
        return parse_dlrm(text, default_name=file.stem, folder=file.parent)
    except TraincastError as error:
        raise TraincastError(f"{format_path(file)}: {error}") from None


def parse_dlrm(text: str, *, default_name: str = "dlrm", folder: Path = Path()) -> DlrmConfig:
    """The DLRM described by YAML text; files of raw indices are looked for in `folder`."""
    fields = parse_yaml(text, "a DLRM description")
    if not isinstance(fields, dict):
        raise TraincastError("not a DLRM description: expected fields such as 'bottom_mlp: [13, 512, 128]'")
    return _read_config(fields, default_name, folder)


def _read_config(content: dict[Any, Any], default_name: str, folder: Path) -> DlrmConfig:
    for key in content:
        if key not in _FIELDS:
            raise make_unknown_error("field", str(key), _FIELDS, f"Known fields: {', '.join(_FIELDS)}.")
    for key in _REQUIRED:
        if key not in content:
            raise TraincastError(f"field '{key}' is missing")
    known: dict[str, Any] = {"name": content.get("name", default_name)}
    if not isinstance(known["name"], str) or not known["name"]:
        raise TraincastError(f"field 'name' must be text, got {shorten_value(known['name'])}")
    known["bottom_mlp"] = read_sizes("bottom_mlp", content["bottom_mlp"], least=2, most=MAX_LAYERS)
    known["top_mlp"] = read_sizes("top_mlp", content["top_mlp"], least=1, most=MAX_LAYERS)
    if known["top_mlp"][-1] != 1:
        raise TraincastError(f"field 'top_mlp' must end in 1 (one click probability), got {known['top_mlp'][-1]}")
    tables = _count_tables(content)
    for key in ("rows_per_table", "lookups_per_table"):
        known[key] = _read_per_table(key, content[key], tables)
    known["access"] = _read_access(content.get("access"), known["rows_per_table"], known["lookups_per_table"], folder)
    for key in ("embedding_dim", "batch_size", "resident_rows"):
        if key in content:
            known[key] = _read_integer(key, content[key], least=0 if key == "resident_rows" else 1)
    for key, allowed in _CHOICES.items():
        if key in content:
            known[key] = _read_choice(key, content[key], allowed)
    config = DlrmConfig(**known)
    if sum(config.table_rows) * config.embedding_dim * 4 > MAX_TABLE_BYTES:
        raise TraincastError("the tables together are larger than any memory; lower rows_per_table or embedding_dim")
    return config


def _count_tables(content: dict[Any, Any]) -> int:
    """From `num_tables`, or from whichever list has an entry per table."""
    lists = [key for key in ("rows_per_table", "lookups_per_table") if isinstance(content[key], list)]
    counts = {key: len(content[key]) for key in lists}
    if "num_tables" in content:
        counts["num_tables"] = _read_integer("num_tables", content["num_tables"])
    if not counts:
        raise TraincastError("field 'num_tables' is missing (or give 'rows_per_table' as a list)")
    if len(set(counts.values())) > 1:
        notes = ", ".join(f"{key} says {count}" for key, count in counts.items())
        raise TraincastError(f"the number of tables is not clear: {notes}")
    number = next(iter(counts.values()))
    if not 1 <= number <= MAX_TABLES:
        raise TraincastError(f"a DLRM has from 1 to {MAX_TABLES} tables, got {number}")
    return number


def _read_access(value: Any, rows: tuple[int, ...], lookups: tuple[int, ...], folder: Path) -> tuple[str, ...]:
    """Which rows each table's lookups want. Even tables that want all alike need not say so."""
    if value is None:
        return () if len(set(lookups)) == 1 else (format_access(Uniform()),) * len(rows)
    from traincast.models.embeddings.read import make_access

    entries = value if isinstance(value, list) else [value] * len(rows)
    if len(entries) != len(rows):
        raise TraincastError(
            f"field 'access' has {len(entries)} entries for {len(rows)} tables; give one or one per table"
        )
    texts = []
    for number, (entry, height) in enumerate(zip(entries, rows, strict=True)):
        try:
            texts.append(format_access(make_access(entry, folder, height)[0]))
        except TraincastError as error:
            raise TraincastError(f"field 'access', table {number}: {error}") from error
    return tuple(texts)


def _read_per_table(key: str, value: Any, tables: int) -> tuple[int, ...]:
    if isinstance(value, list):
        return read_sizes(key, value, least=1, most=MAX_TABLES)
    return (_read_integer(key, value),) * tables


def read_sizes(key: str, value: Any, *, least: int, most: int) -> tuple[int, ...]:
    """The integers of a field that is a list of so many of them."""
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise TraincastError(f"field '{key}' must be a list of {least} to {most} integers, got {shorten_value(value)}")
    return tuple(_read_integer(key, item) for item in value)


def _read_integer(key: str, value: Any, *, least: int = 1) -> int:
    most = _LARGEST[key]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise TraincastError(f"field '{key}' takes integers from {least} to {most}, got {shorten_value(value)}")
    return value


def _read_choice(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise make_unknown_error(key, str(value)[:80], allowed, f"Field '{key}' takes {', '.join(allowed)}.")
    return value


def load_described_dlrm(name: str) -> DlrmConfig:
    """The DLRM of this name, built in or in YAML."""
    if name.endswith((".yaml", ".yml")):
        return read_dlrm(Path(name))
    return DLRM_V2 if name == DLRM_V2.name else STUDY_DLRMS[name]

"""Table sets from a built-in name or from a YAML, JSON, CSV or Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traincast.models.embeddings.access import Access, Reuse, parse_access
from traincast.models.embeddings.documents import (
    BUILTIN_SETS,
    list_entries,
    load_builtin_tables,
    share_fields,
    translate_fields,
)
from traincast.models.embeddings.raw import MeasuredAccess, measure_access
from traincast.models.embeddings.raw_files import read_bags_from_npz, read_bags_from_parquet
from traincast.models.embeddings.reuse import ReuseHistogram
from traincast.models.embeddings.table import Pooling, Table, check_tables
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.parquet import check_parquet_size, reject_bad_parquet
from traincast.utils.files.reading import read_csv, read_document

MAX_BYTES = 1 << 25  # of a description; a limit against damaged files
MAX_TABLES = 100_000  # a hundred times the largest built-in set
_FIELDS = ("name", "rows", "dim", "pooling", "access", "dtype", "weighted", "optimizer")
_REUSE_FIELDS = ("lookups", "unique_rows", "row_shares", "access_shares", "precision")
_RAW_FIELDS = ("indices", "table", "column", "batch_size")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no", "")
_ACCESS_HELP = "give 'uniform', 'zipf:EXPONENT', or a mapping with 'reuse' or 'indices'"


def load_tables(source: str | Path) -> tuple[Table, ...]:
    """The tables of a built-in set, or of a `.yaml`, `.json`, `.csv` or `.parquet` file."""
    if str(source) in BUILTIN_SETS:
        return load_builtin_tables(str(source))
    path = Path(source)
    readers = {**dict.fromkeys((".yaml", ".yml", ".json"), _read_entries), ".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise make_unknown_error(
            "table set", str(source), BUILTIN_SETS, "Give a built-in set or a .yaml, .json, .csv or .parquet file."
        )
    try:
        tables = []
        for number, entry in enumerate(readers[path.suffix.lower()](path), start=1):
            if number > MAX_TABLES:
                raise TraincastError(f"{path}: more than {MAX_TABLES} tables; split the set")
            named = share_fields(entry, {"name": f"t{number}"})
            tables.append(make_table(named, f"{path}: table {number}", path.parent))
    except (OSError, UnicodeDecodeError) as error:
        raise TraincastError(f"{path}: cannot be read ({error})") from error
    try:
        return check_tables(tables)
    except TraincastError as error:
        raise TraincastError(f"{path}: {error}") from error


def _read_entries(path: Path) -> Iterator[Any]:
    return list_entries(read_document(path, most=MAX_BYTES), str(path))


def _read_csv(path: Path) -> Iterator[Any]:
    for row in read_csv(path, most=MAX_BYTES):
        yield {name: value for name, value in row.items() if value != ""}


def _read_parquet(path: Path) -> Iterator[Any]:
    import polars as pl

    check_parquet_size(path, str(path))
    with reject_bad_parquet(str(path)):
        frame = pl.read_parquet(path, n_rows=MAX_TABLES + 1)
    for row in frame.iter_rows(named=True):
        yield {name: value for name, value in row.items() if value is not None}


def make_table(entry: Any, label: str, folder: Path) -> Table:
    """One table from its fields as a file has them; raw indices are looked for in `folder`.

    Complaints begin with `label`, whose last word is the number of the table and gives way to its name.
    """
    if not isinstance(entry, Mapping):
        raise TraincastError(f"{label}: give a mapping with name, rows and dim")
    if "name" in entry:
        name = entry["name"]
        if isinstance(name, bool) or not isinstance(name, str | int | float) or not str(name).isprintable():
            raise TraincastError(f"{label}: name {shorten_value(name)}; give a printable word")
        label = f"{label.rpartition(' ')[0]} '{name}'"
    entry = translate_fields(entry, label)
    for field in entry:
        if field not in _FIELDS:
            raise make_unknown_error("field", str(field), _FIELDS, f"{label} may have {', '.join(_FIELDS)}.")
    for field in ("name", "rows", "dim"):
        if field not in entry:
            raise TraincastError(f"{label}: no {field}; give one")
    try:
        rows = _read_integer(entry["rows"], "rows")
        access, measured = make_access(entry.get("access", "uniform"), folder, rows)
        return Table(
            name=str(entry["name"]),
            rows=rows,
            dim=_read_integer(entry["dim"], "dim"),
            pooling=_read_pooling(entry.get("pooling"), measured),
            access=access,
            dtype=str(entry.get("dtype", "fp32")),
            weighted=_read_flag(entry.get("weighted", False)),
            optimizer=str(entry.get("optimizer", "sgd")),
        )
    except TraincastError as error:
        message = str(error).removeprefix(f"table '{entry['name']}': ")
        raise TraincastError(message if label in message else f"{label}: {message}") from error


def make_access(value: Any, folder: Path, rows: int) -> tuple[Access, MeasuredAccess | None]:
    """The distribution of a table of `rows`, and what was measured where it came from raw indices in `folder`."""
    if isinstance(value, str):
        return parse_access(value), None
    if not isinstance(value, Mapping) or len(value) == 0:
        raise TraincastError(f"access {shorten_value(value)}; {_ACCESS_HELP}")
    if set(value) == {"reuse"} and isinstance(value["reuse"], Mapping):
        return Reuse(_read_histogram(value["reuse"])), None
    if "indices" not in value:
        raise TraincastError(f"access with {', '.join(map(str, value))}; {_ACCESS_HELP}")
    for field in value:
        if field not in _RAW_FIELDS:
            raise make_unknown_error(
                "field", str(field), _RAW_FIELDS, f"Raw indices may have {', '.join(_RAW_FIELDS)}."
            )
    measured = _read_raw_indices(value, folder, rows)
    return measured.access, measured


def _read_histogram(value: Mapping[Any, Any]) -> ReuseHistogram:
    missing = [field for field in _REUSE_FIELDS[:4] if field not in value]
    if missing or set(value) - set(_REUSE_FIELDS):
        raise TraincastError(
            f"access reuse: give {', '.join(_REUSE_FIELDS[:4])}, and precision where shares are rounded"
        )
    shares = {name: value[name] for name in ("row_shares", "access_shares")}
    for name, listed in shares.items():
        if not isinstance(listed, list):
            raise TraincastError(f"access reuse: {name} {shorten_value(listed)}; give a list of shares")
    return ReuseHistogram(
        lookups=_read_number(value["lookups"], "lookups"),
        unique_rows=_read_number(value["unique_rows"], "unique_rows"),
        row_shares=tuple(_read_number(share, "row_shares") for share in shares["row_shares"]),
        access_shares=tuple(_read_number(share, "access_shares") for share in shares["access_shares"]),
        precision=_read_number(value.get("precision", 0.0), "precision"),
    )


def _read_raw_indices(value: Mapping[Any, Any], folder: Path, rows: int) -> MeasuredAccess:
    path = folder / str(value["indices"])
    if not _is_inside(path, folder):
        raise TraincastError(
            f"access: {shorten_value(str(value['indices']))} is outside the folder of the file that names it; "
            "put the indices alongside it"
        )
    if not path.is_file():
        raise TraincastError(f"access: no file {path}; 'indices' is relative to the table set")
    size = _read_integer(value["batch_size"], "batch_size") if "batch_size" in value else None
    if size is not None and size < 1:
        raise TraincastError(f"access: batch_size {size}; give 1 or more")
    if path.suffix == ".npz" and "column" not in value:
        batches = read_bags_from_npz(path, table=_read_integer(value.get("table", 0), "table"), batch_size=size)
    elif path.suffix == ".parquet" and size is not None and "column" in value and "table" not in value:
        batches = read_bags_from_parquet(path, column=str(value["column"]), batch_size=size)
    else:
        raise TraincastError(
            f"access: {path.name}; give a .npz file (with 'table' where it has several), or a .parquet file with "
            "'column' and 'batch_size'"
        )
    try:
        return measure_access(batches, rows=rows)
    except TraincastError as error:
        message = str(error)
        raise TraincastError(f"access: {message if str(path) in message else f'{path}: {message}'}") from error


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a file is in a folder or below it, links followed: a description says nothing about other places."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # no path at all, or links in a circle
        return False


def _read_pooling(value: Any, measured: MeasuredAccess | None) -> Pooling:
    if value is None:
        return measured.pooling if measured else Pooling.from_constant(1.0)
    if isinstance(value, Mapping):
        if set(value) != {"lengths", "shares"} or not all(isinstance(entries, list) for entries in value.values()):
            raise TraincastError("pooling: give a number, or 'lengths' and 'shares' as lists")
        return Pooling(*(tuple(_read_number(item, "pooling") for item in value[key]) for key in ("lengths", "shares")))
    return Pooling.from_constant(_read_number(value, "pooling"))


def _read_number(value: Any, name: str) -> float:
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TraincastError(f"{name} {shorten_value(value)}; give a number")


def _read_integer(value: Any, name: str) -> int:
    number = _read_number(value, name)
    if number != number or number in (float("inf"), float("-inf")) or number != int(number):
        raise TraincastError(f"{name} {shorten_value(value)}; give an integer")
    return int(number)


def _read_flag(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in (*_TRUE, *_FALSE):
        raise TraincastError(f"weighted {shorten_value(value)}; give true or false")
    return text in _TRUE

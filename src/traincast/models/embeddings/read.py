"""Table sets from a built-in name or a YAML, JSON, CSV or Parquet file, and raw indices from files. Nothing is ever
unpickled."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from traincast.models.embeddings.access import Access, Reuse, parse_access
from traincast.models.embeddings.documents import (
    BUILTIN_SETS,
    list_entries,
    load_builtin_tables,
    share_fields,
    translate_fields,
)
from traincast.models.embeddings.raw import (
    Bags,
    MeasuredAccess,
    check_integers,
    check_lengths,
    choose_batch_size,
    compute_lengths,
    convert_to_int64,
    measure_access,
    sum_safely,
)
from traincast.models.embeddings.reuse import ReuseHistogram
from traincast.models.embeddings.table import Pooling, Table, check_tables
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.parquet import read_parquet, reject_bad_parquet, scan_parquet
from traincast.utils.files.reading import read_csv, read_document

_PIECE_ITEMS = 1 << 20  # numbers read at a time: 8 MiB
_MAX_SAMPLES = 1 << 24  # of a file whose lengths are held in memory
_MAX_TABLES = 100_000  # of a file; a hundred times the largest built-in set
_MAX_LENGTHS = 1 << 28  # of all tables together: 856 tables at a batch of 65,536 have a fifth of that
_MAX_BATCH = 1 << 24  # lookups of one batch of one table; counting them takes under 2 GiB
_UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


def read_bags_from_npz(path: Path, *, table: int = 0, batch_size: int | None = None) -> Iterator[Bags]:
    """Batches of one table of a `.npz` file, read piece by piece.

    The file holds `indices` and `lengths`: one length per sample, or [tables, samples] with the indices of one table
    after those of another, as FBGEMM orders them. `offsets` stand in for one-dimensional lengths.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = {"lengths.npy", "offsets.npy"} & set(archive.namelist())
            if "indices.npy" not in archive.namelist() or len(names) != 1:
                raise TraincastError(f"{path}: needs arrays 'indices' and either 'lengths' or 'offsets'")
            with archive.open("indices.npy") as file:
                member = _Member(file, f"{path}: indices")
                if len(member.shape) != 1:
                    raise TraincastError(f"{path}: indices have {len(member.shape)} dimensions; give one")
                skipped, bag_lengths = _read_lengths(archive, names.pop(), path, table, member.shape[0])
                member.skip(skipped)
                step = choose_batch_size(batch_size, len(bag_lengths))
                for first in range(0, len(bag_lengths), step):
                    part = bag_lengths[first : first + step]
                    yield Bags(member.take(sum_safely(part)), part)
    except _UNREADABLE as error:
        raise TraincastError(f"{path}: not a readable .npz file ({error})") from error


def _read_lengths(archive: zipfile.ZipFile, name: str, path: Path, table: int, count: int) -> tuple[int, IntArray]:
    """Indices before those of the table, and the lengths of its samples. All tables together have `count`."""
    label = f"{path}: {name.removesuffix('.npy')}"
    with archive.open(name) as file:
        member = _Member(file, label)
        tables, samples = member.shape if len(member.shape) == 2 else (1, member.shape[0])
        if tables > _MAX_TABLES or tables * samples > _MAX_LENGTHS:
            raise TraincastError(
                f"{label} of {tables} tables and {samples} samples; split the file "
                f"({_MAX_TABLES} tables and {_MAX_LENGTHS} lengths are the most)"
            )
        if samples > _MAX_SAMPLES:
            raise TraincastError(f"{path}: {samples} samples; split the file ({_MAX_SAMPLES} are the most)")
        if not 0 <= table < tables or (name == "offsets.npy" and len(member.shape) == 2):
            raise TraincastError(f"{path}: no table {table}; {label.rpartition(' ')[2]} describe {tables}")
        if len(member.shape) == 1:
            values = member.take(samples)
            bag_lengths = compute_lengths(values, count, label) if name == "offsets.npy" else values
            check_lengths(bag_lengths, count, label)
            return 0, bag_lengths
        return _read_lengths_of_tables(member, table, count, label)


def _read_lengths_of_tables(member: _Member, table: int, count: int, label: str) -> tuple[int, IntArray]:
    """Every table's lengths are read, one table at a time, since only together can they agree with the indices."""
    tables, samples = member.shape
    total, skipped, bag_lengths = 0, 0, np.zeros(0, dtype=np.int64)
    for number in range(tables):
        table_lengths = member.take(samples)
        if number == table:
            skipped, bag_lengths = total, table_lengths
        if samples and int(table_lengths.min()) < 0:
            raise TraincastError(
                f"{label}: {int(table_lengths.min())} in table {number}; a sample makes 0 lookups or more"
            )
        total += sum_safely(table_lengths)
    if total != count:
        raise TraincastError(f"{label} sum to {total} for {count} indices; they must agree")
    return skipped, bag_lengths


class _Member:
    """An integer array inside a zip file, taken from its beginning on."""

    def __init__(self, file: IO[bytes], label: str) -> None:
        self._file, self._label = file, label
        try:
            version = np.lib.format.read_magic(file)
            reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, fortran, self._dtype = reader(file)
        except (ValueError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TraincastError(f"{label}: not an array ({reason})") from error
        check_integers(label, self._dtype)
        if len(self.shape) not in (1, 2) or (fortran and len(self.shape) == 2) or min(self.shape) < 0:
            raise TraincastError(f"{label}: give one dimension, or [tables, samples] in C order")

    def take(self, count: int) -> IntArray:
        """The next `count` numbers."""
        if count > _MAX_BATCH:
            raise TraincastError(f"{self._label}: {count} numbers in one batch; give a smaller batch_size")
        data = self._file.read(count * self._dtype.itemsize)
        if len(data) < count * self._dtype.itemsize:
            raise TraincastError(f"{self._label}: the file ends before its {self.shape[0]} numbers do; write it again")
        return convert_to_int64(np.frombuffer(data, dtype=self._dtype), self._label)

    def skip(self, count: int) -> None:
        """Passes over `count` numbers."""
        while count > 0:
            count -= len(self.take(min(count, _PIECE_ITEMS)))


def read_bags_from_parquet(path: Path, *, column: str, batch_size: int) -> Iterator[Bags]:
    """Batches of one column of a Parquet file: one row per sample, which holds a list of row numbers or a single one.

    A sample that is null makes no lookups; a null inside a list is rejected.
    """
    import polars as pl

    step = choose_batch_size(batch_size, 0)
    if step > _MAX_SAMPLES:
        raise TraincastError(f"{path}: batch_size {shorten_value(step)}; {_MAX_SAMPLES} are the most")
    frame = scan_parquet(path, str(path))
    with reject_bad_parquet(str(path)):
        schema = frame.collect_schema()
    if column not in schema:
        raise TraincastError(f"{path}: no column '{column}'; it has {', '.join(schema.names()[:10])}")
    kind = schema[column]
    inner = kind.inner if isinstance(kind, pl.List) else kind
    if not inner.is_integer():
        raise TraincastError(f"{path}: column '{column}' is {kind}; give integers or lists of them")
    start = 0
    while True:
        with reject_bad_parquet(str(path)):
            bags = frame.select(column).slice(start, step).collect().get_column(column)
        if not len(bags):
            return
        kept = bags.drop_nulls()
        if isinstance(kind, pl.List):
            bag_lengths = bags.list.len().fill_null(0)
            flat = kept.filter(kept.list.len() > 0).explode()
        else:
            bag_lengths, flat = bags.is_not_null(), kept
        if flat.null_count():
            raise TraincastError(f"{path}: column '{column}' has a null inside a list; give row numbers only")
        if len(flat) > _MAX_BATCH:
            raise TraincastError(f"{path}: {len(flat)} lookups in one batch; give a smaller batch_size")
        yield Bags(
            convert_to_int64(flat.to_numpy(), f"{path}: column '{column}'"), bag_lengths.cast(pl.Int64).to_numpy()
        )
        start += step


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
    for row in read_parquet(path, str(path), n_rows=MAX_TABLES + 1).iter_rows(named=True):
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

"""Raw indices from files, batch by batch: `.npz` (streamed) and Parquet (sliced). Nothing is ever unpickled."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from traincast.models.embeddings.raw import (
    Bags,
    check_integers,
    check_lengths,
    choose_batch_size,
    compute_lengths,
    convert_to_int64,
    sum_safely,
)
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.parquet import reject_bad_parquet

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
    with reject_bad_parquet(str(path)):
        frame = pl.scan_parquet(path)
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

"""Raw indices with lengths or offsets, batch by batch: from arrays, `.npz` files (streamed) and Parquet (sliced)."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from traincast.embeddings.lru import MAX_PIECE, IntArray
from traincast.errors import TraincastError

_PIECE_ITEMS = 1 << 20
_MAX_SAMPLES = 1 << 24


@dataclass(frozen=True, eq=False, slots=True)
class Bags:
    """One batch of one table: `lengths` of its samples and their `indices`, sample after sample."""

    indices: IntArray
    lengths: IntArray


def from_arrays(
    indices: npt.ArrayLike,
    *,
    lengths: npt.ArrayLike | None = None,
    offsets: npt.ArrayLike | None = None,
    batch_size: int | None = None,
) -> Iterator[Bags]:
    """Batches from arrays (or tensors on the host); one batch when `batch_size` is not given."""
    flat = np.asarray(indices)
    if (lengths is None) == (offsets is None):
        raise TraincastError("indices need either lengths or offsets; give one of them")
    if offsets is not None:
        ends = np.asarray(offsets)
        with_end = ends if len(ends) and ends[-1] == len(flat) else np.append(ends, len(flat))
        each = np.diff(with_end)
    else:
        each = np.asarray(lengths)
    _whole("indices", flat.dtype)
    _whole("lengths", each.dtype)
    if flat.ndim != 1 or each.ndim != 1 or int(each.sum()) != len(flat) or (len(each) and each.min() < 0):
        raise TraincastError(f"lengths sum to {int(each.sum())} for {len(flat)} indices; they must agree, none below 0")
    step = batch_size or max(len(each), 1)
    start = 0
    for first in range(0, len(each), step):
        part = each[first : first + step].astype(np.int64)
        stop = start + int(part.sum())
        yield Bags(flat[start:stop].astype(np.int64), part)
        start = stop


def from_npz(path: Path, *, table: int = 0, batch_size: int | None = None) -> Iterator[Bags]:
    """Batches of one table of a `.npz` file, read piece by piece.

    The file holds `indices` and `lengths`: one length a sample, or [tables, samples] with the indices of one table
    after those of another, as FBGEMM orders them. `offsets` stand in for one-dimensional lengths.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            if "indices.npy" not in names or not names & {"lengths.npy", "offsets.npy"}:
                raise TraincastError(f"{path}: needs arrays 'indices' and 'lengths' (or 'offsets')")
            skipped, each = _lengths(archive, names, path, table)
            with archive.open("indices.npy") as file:
                member = _Member(file, f"{path}: indices")
                member.skip(skipped)
                step = batch_size or max(len(each), 1)
                for first in range(0, len(each), step):
                    part = each[first : first + step]
                    yield Bags(member.take(int(part.sum())), part)
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise TraincastError(f"{path}: not a readable .npz file ({error})") from error


def _lengths(archive: zipfile.ZipFile, names: set[str], path: Path, table: int) -> tuple[int, IntArray]:
    """Indices before those of the table, and the lengths of its samples."""
    name = "lengths" if "lengths.npy" in names else "offsets"
    with archive.open(f"{name}.npy") as file:
        member = _Member(file, f"{path}: {name}")
        tables, samples = member.shape if len(member.shape) == 2 else (1, member.shape[0])
        if samples > _MAX_SAMPLES:
            raise TraincastError(f"{path}: {samples} samples; split the file ({_MAX_SAMPLES} are the most)")
        if not 0 <= table < tables or (name == "offsets" and tables > 1):
            raise TraincastError(f"{path}: no table {table}; {name} describe {tables}")
        skipped = sum(int(member.take(samples).sum()) for _ in range(table))
        values = member.take(samples)
    each = np.diff(values) if name == "offsets" else values
    if len(each) and each.min() < 0:
        raise TraincastError(f"{path}: {name} hold lengths below 0; bags have 0 lookups or more")
    return skipped, each


class _Member:
    """An integer array inside a zip file, taken from its beginning on."""

    def __init__(self, file: IO[bytes], label: str) -> None:
        self._file, self._label = file, label
        try:
            version = np.lib.format.read_magic(file)
            reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, fortran, self._dtype = reader(file)
        except ValueError as error:
            raise TraincastError(f"{label}: not an array ({error})") from error
        _whole(label, self._dtype)
        if len(self.shape) not in (1, 2) or (fortran and len(self.shape) == 2):
            raise TraincastError(f"{label}: give one dimension, or [tables, samples] in C order")

    def take(self, count: int) -> IntArray:
        """The next `count` numbers."""
        if count > MAX_PIECE:
            raise TraincastError(f"{self._label}: {count} numbers in one batch; give a smaller batch_size")
        data = self._file.read(count * self._dtype.itemsize)
        if len(data) < count * self._dtype.itemsize:
            raise TraincastError(f"{self._label}: ends too early; lengths and indices must agree")
        return np.frombuffer(data, dtype=self._dtype).astype(np.int64)

    def skip(self, count: int) -> None:
        """Passes over `count` numbers."""
        while count > 0:
            count -= len(self.take(min(count, _PIECE_ITEMS)))


def from_parquet(path: Path, *, column: str, batch_size: int) -> Iterator[Bags]:
    """Batches of one column of a Parquet file: a sample a row, a list of row numbers (or a single one) a sample."""
    import polars as pl

    frame = pl.scan_parquet(path)
    try:
        schema = frame.collect_schema()
        if column not in schema:
            raise TraincastError(f"{path}: no column '{column}'; it has {', '.join(schema.names()[:10])}")
        kind = schema[column]
        inner = kind.inner if isinstance(kind, pl.List) else kind
        if not inner.is_integer():
            raise TraincastError(f"{path}: column '{column}' is {kind}; give whole numbers or lists of them")
        start = 0
        while True:
            bags = frame.select(column).slice(start, batch_size).collect().get_column(column)
            if not len(bags):
                return
            single = bags.is_not_null().cast(pl.Int64)
            each = bags.list.len().fill_null(0) if isinstance(kind, pl.List) else single
            flat = bags.explode() if isinstance(kind, pl.List) else bags
            yield Bags(flat.drop_nulls().cast(pl.Int64).to_numpy(), each.cast(pl.Int64).to_numpy())
            start += batch_size
    except (OSError, pl.exceptions.PolarsError) as error:
        raise TraincastError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from error


def _whole(label: str, dtype: np.dtype[np.generic]) -> None:
    if dtype.kind not in "iu":
        raise TraincastError(f"{label}: {dtype} numbers; give integers")

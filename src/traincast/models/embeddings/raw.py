"""Raw indices with lengths or offsets, batch by batch, from arrays or tensors; what is wrong with them by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError

_LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False, slots=True)
class Bags:
    """One batch of one table: `lengths` of its samples and their `indices`, sample after sample."""

    indices: IntArray
    lengths: IntArray


def read_bags_from_arrays(
    indices: npt.ArrayLike,
    *,
    lengths: npt.ArrayLike | None = None,
    offsets: npt.ArrayLike | None = None,
    batch_size: int | None = None,
) -> Iterator[Bags]:
    """Batches from arrays (or tensors on the host); one batch when `batch_size` is not given."""
    if (lengths is None) == (offsets is None):
        raise TraincastError("indices need either lengths or offsets; give one of them")
    flat = _convert_to_array(indices, "indices")
    bag_lengths = (
        _convert_to_array(lengths, "lengths")
        if offsets is None
        else compute_lengths(_convert_to_array(offsets, "offsets"), len(flat))
    )
    check_lengths(bag_lengths, len(flat))
    step = choose_batch_size(batch_size, len(bag_lengths))
    start = 0
    for first in range(0, len(bag_lengths), step):
        part = bag_lengths[first : first + step].astype(np.int64)
        stop = start + int(part.sum())
        yield Bags(convert_to_int64(flat[start:stop], "indices"), part)
        start = stop


def check_lengths(lengths: IntArray, count: int, label: str = "lengths") -> None:
    """Rejects lengths below 0, and those that do not sum to the number of indices."""
    if len(lengths) and int(lengths.min()) < 0:
        raise TraincastError(f"{label}: {int(lengths.min())}; a sample makes 0 lookups or more")
    total = sum_safely(lengths)
    if total != count:
        raise TraincastError(f"{label} sum to {total} for {count} indices; they must agree")


def sum_safely(lengths: IntArray) -> int:
    """The sum of numbers at or above 0, whatever their type could hold."""
    if len(lengths) and int(lengths.max()) > _LARGEST // len(lengths):
        return sum(int(length) for length in lengths)
    return int(lengths.sum(dtype=np.int64))


def compute_lengths(offsets: IntArray, count: int, label: str = "offsets") -> IntArray:
    """Lengths from where every sample begins; the end of the last may be there or not."""
    if not len(offsets):
        return np.zeros(0, dtype=np.int64)
    if int(offsets[0]) != 0:
        raise TraincastError(f"{label} begin with {int(offsets[0])}; the first sample begins at 0")
    falling = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falling):
        place = int(falling[0])
        raise TraincastError(f"{label} fall from {int(offsets[place])} to {int(offsets[place + 1])}; they may not")
    if int(offsets[-1]) > count:
        raise TraincastError(f"{label} reach {int(offsets[-1])} for {count} indices; they must agree")
    starts = convert_to_int64(offsets, label)
    return np.diff(starts if starts[-1] == count else np.append(starts, count))


def choose_batch_size(batch_size: int | None, samples: int) -> int:
    """Samples of one batch; all of them where no size was given."""
    if batch_size is None:
        return max(samples, 1)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise TraincastError(f"batch_size {batch_size!r}; give an integer from 1")
    return int(batch_size)


def convert_to_int64(values: npt.NDArray[Any], label: str) -> IntArray:
    """The numbers as int64."""
    if values.dtype.kind == "u" and len(values) and int(values.max()) > _LARGEST:
        raise TraincastError(f"{label}: {int(values.max())} is too large for a row number")
    return values.astype(np.int64)


def check_integers(label: str, dtype: np.dtype[Any]) -> None:
    """Rejects what is not a type of integers."""
    if dtype.kind not in "iu":
        raise TraincastError(f"{label}: {dtype} numbers; give integers")


def _convert_to_array(values: Any, label: str) -> npt.NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray):
        raise TraincastError(f"{label}: a masked array; give the numbers that count")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise TraincastError(f"{label}: no array of integers in host memory ({reason})") from error
    if array.ndim != 1:
        raise TraincastError(f"{label}: {array.ndim} dimensions; give one, the numbers of one sample after another")
    if not array.size and array.dtype.kind == "f" and isinstance(values, list | tuple):
        return np.zeros(0, dtype=np.int64)
    check_integers(label, array.dtype)
    return array

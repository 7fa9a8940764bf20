"""Reading measured tables: every row is checked before a fit sees it, and the held-out fifth is set apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from traincast.hardware import Device, find_device_by_name
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.errors import TraincastError, escape_text, make_unknown_error, shorten_value
from traincast.utils.files.parquet import MAX_ROWS, check_parquet_size

if TYPE_CHECKING:
    import polars as pl

HELD_OUT_SHARE = 0.2
"""Of the rows: what no fit may see."""
HASH_SEED = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, the increment of SplitMix64; the multipliers of `held_out` are that generator's too."""
_LARGEST = 1e15  # beyond every size and time that was measured; GEMMs of a few stay finite
_LISTED = 4  # odd rows that a message names after the first; the others are counted


@dataclass(frozen=True, eq=False, slots=True)
class MeasuredTable:
    """A measured table: its file name for messages, and its columns. Text columns are object arrays.

    `row` says where in the file each row stands, counted from 0 (None: as they are).
    """

    file: str
    columns: dict[str, npt.NDArray[Any]]
    row: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def text(self, name: str) -> npt.NDArray[Any]:
        """A text column."""
        return self.columns[name]

    def number(self, name: str) -> FloatArray:
        """A numeric column as float64."""
        return self.columns[name].astype(np.float64)

    def take(self, rows: BoolArray) -> MeasuredTable:
        """A selection of rows, which keep their place in the file."""
        row = np.arange(len(self)) if self.row is None else self.row
        return MeasuredTable(self.file, {name: column[rows] for name, column in self.columns.items()}, row[rows])

    def where(self, index: int, column: str) -> str:
        """The file, row and column of a value, for messages."""
        return f"'{self.file}', row {self.place(index)}, column '{column}'"

    def place(self, index: int) -> int:
        """The row of the file, counted from 0, at which a row of this selection stands."""
        return index if self.row is None else int(self.row[index])


Odd = tuple[int, str]
"""A row of a table that cannot be used, and why."""


def read_table(
    data: Path, file: str, text: Sequence[str], numbers: Sequence[str], *, positive: Sequence[str] = (),
    among: Mapping[str, Collection[str]] | None = None, optional: Collection[str] = (),
) -> MeasuredTable:  # fmt: skip
    """Columns of a Parquet or CSV table under `data`. `positive` columns must hold finite numbers above zero, those of
    `among` one of these words; text may be missing in `optional` columns only. Rows that break this are listed."""
    frame = _read_frame(data, file)
    for name in (*text, *numbers):
        if name not in frame.columns:
            raise TraincastError(f"'{file}' lacks the column '{name}'; it has {', '.join(frame.columns)}")
    table = MeasuredTable(file, {})
    for name in text:
        table.columns[name] = _read_texts(table, frame[name], name in optional)
    for name, known in (among or {}).items():
        check_among(table, name, known)
    for name in numbers:
        table.columns[name] = _read_numbers(table, frame[name])
    for name in positive:
        check_positive(table, name)
    return table


def read_medians(
    data: Path, file: str, text: Sequence[str], numbers: Sequence[str], value: str, *,
    among: Mapping[str, Collection[str]], without: Mapping[str, str] | None = None,
) -> MeasuredTable:  # fmt: skip
    """A large table with the rows that agree in `text` and `numbers` merged to the median of `value` (of two: the lower
    one), sorted by them.

    Words are checked against `among`; a value that is no positive number is found row by row (`read_table`). Rows with
    all words of `without`, column by column, are left out.
    """
    import polars as pl

    frame = _read_frame(data, file)
    for name in (*text, *numbers, value, *(without or {})):
        if name not in frame.columns:
            raise TraincastError(f"'{file}' lacks the column '{name}'; it has {', '.join(frame.columns)}")
    if without:
        frame = frame.filter(~pl.all_horizontal([pl.col(name) == word for name, word in without.items()]))
    measured = frame[value].cast(pl.Float64, strict=False)
    strange = any(not set(frame[name].unique().to_list()) <= set(known) for name, known in among.items())
    if strange or measured.null_count() or not measured.is_finite().all() or (measured <= 0.0).any():
        read_table(data, file, text, (*numbers, value), positive=(*numbers, value), among=among)
    merged = frame.group_by([*text, *numbers]).agg(pl.col(value).quantile(0.5, "lower")).sort([*text, *numbers])
    columns: dict[str, npt.NDArray[Any]] = {name: merged[name].to_numpy().astype(object) for name in text}
    columns |= {name: merged[name].to_numpy().astype(np.float64) for name in (*numbers, value)}
    table = MeasuredTable(file, columns)
    for name in (*numbers, value):
        check_positive(table, name)
    return table


def _read_frame(data: Path, file: str) -> pl.DataFrame:
    import polars as pl

    path = data / file
    if not path.is_file():
        raise TraincastError(f"measurements '{file}' are not under {data}; give the folder that holds them with `data`")
    try:
        if file.endswith(".parquet"):
            check_parquet_size(path, file)
            frame = pl.read_parquet(path)
        else:
            frame = pl.read_csv(path, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise TraincastError(f"cannot read '{file}': {str(error).splitlines()[0]}") from None
    if not frame.height:
        raise TraincastError(f"'{file}' has no rows")
    if frame.height > MAX_ROWS:
        raise TraincastError(f"'{file}' has {frame.height} rows; at most {MAX_ROWS} are read")
    return frame


def _read_texts(table: MeasuredTable, column: pl.Series, may_be_missing: bool) -> npt.NDArray[Any]:
    """A text column; true and false stay what they are."""
    import polars as pl

    missing = column.is_null() & (not may_be_missing)
    reject_cells(table, column.name, [(row, "is empty") for row in np.flatnonzero(missing).tolist()])
    kept = column if column.dtype in (pl.String, pl.Boolean) else column.cast(pl.String)
    return kept.to_numpy().astype(object)


def _read_numbers(table: MeasuredTable, column: pl.Series) -> FloatArray:
    """A column of numbers; what is missing becomes NaN."""
    import polars as pl

    try:
        values = column.cast(pl.Float64, strict=False)
    except pl.exceptions.PolarsError:  # a kind of value that has nothing to do with numbers
        raise TraincastError(f"'{table.file}', column '{column.name}': {column.dtype} is not a number") from None
    lost = (values.is_null() & column.is_not_null()) | (values.fill_nan(None).abs() > _LARGEST).fill_null(value=False)
    reason = f"is not a number of at most {_LARGEST:g}"
    reject_cells(
        table, column.name, [(row, f"{shorten_value(column[row])} {reason}") for row in np.flatnonzero(lost).tolist()]
    )
    return values.to_numpy()


def reject_cells(table: MeasuredTable, column: str, odd: Sequence[Odd]) -> None:
    """Raises one line with the place and reason of every odd row (there may be none), the first few written out."""
    if not odd:
        return
    (first, reason), *others = odd
    listed = [f"row {table.place(row)}: {why}" for row, why in others[:_LISTED]]
    more = [f"and {len(others) - _LISTED} more"] if len(others) > _LISTED else []
    raise TraincastError("; ".join([f"{table.where(first, column)}: {reason}", *listed, *more]))


def check_positive(table: MeasuredTable, column: str) -> None:
    """Rejects a table with anything but finite numbers above zero in this column."""
    values = table.number(column)
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    reject_cells(table, column, [(row, f"{values[row]} is not a positive number") for row in bad.tolist()])


def check_among(table: MeasuredTable, column: str, known: Collection[str]) -> None:
    """Rejects a table with a word in this column that nobody knows what to do with."""
    odd = [
        (row, str(make_unknown_error(column, str(value), known, f"Known are {', '.join(known)}.")))
        for row, value in enumerate(table.text(column))
        if value not in known
    ]
    reject_cells(table, column, odd)


def list_devices(table: MeasuredTable, column: str = "device") -> list[Device]:
    """The devices named in a column, sorted by key; a name no platform file knows is an error."""
    names, first = np.unique(table.text(column).astype(str), return_index=True)
    devices, odd = [], []
    for name, row in zip(names, first, strict=True):
        try:
            devices.append(find_device_by_name(str(name)))
        except TraincastError as error:
            odd.append((int(row), str(error)))
    reject_cells(table, column, odd)
    return sorted(devices, key=lambda device: device.key)


def number_devices(table: MeasuredTable, devices: Sequence[Device], column: str = "device") -> npt.NDArray[np.int64]:
    """Position in `devices` of every row's device."""
    position = {device.name: i for i, device in enumerate(devices)}
    return np.array([position[str(name)] for name in table.text(column)], dtype=np.int64)


def keep_present_values(
    devices: Sequence[Device], device: npt.NDArray[np.int64]
) -> tuple[list[Device], npt.NDArray[np.int64]]:
    """The devices that rows refer to, and the rows' references to that shorter list."""
    present, renumbered = np.unique(device, return_inverse=True)
    return [devices[i] for i in present], renumbered.reshape(-1).astype(np.int64)


def check_possible(
    table: MeasuredTable, least_seconds: FloatArray, seconds: FloatArray, column: str = "latency_us"
) -> None:
    """Rejects a table with a row three times faster than the data sheet allows (`least_seconds`)."""
    bad = np.flatnonzero(seconds * 3 < least_seconds)
    odd = [
        (
            row,
            f"{1e6 * seconds[row]:.4g} us is more than 3 times faster than the sheet of "
            f"'{escape_text(str(table.text('device')[row]))}' allows ({1e6 * least_seconds[row]:.4g} us)",
        )
        for row in bad.tolist()
    ]
    reject_cells(table, column, odd)


def select_held_out(*shape: FloatArray) -> BoolArray:
    """The fifth of the rows that no fit may see, chosen by a hash of the shape: repeats fall together."""
    state = np.full(len(shape[0]), HASH_SEED, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in shape:
            state = (state ^ column.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            state ^= state >> np.uint64(29)
            state *= np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(32)
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53 < HELD_OUT_SHARE

"""Reading the files of published measurements; what is wrong is named by file, row and column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import format_names, read_csv
from traincast_evaluation.suites.cases import Case, LeftOut

Value = TypeVar("Value")
_LONGEST_LABEL = 120  # characters; the longest name of a published system has 60
_LARGEST = 1e15  # milliseconds, samples or GPUs: beyond every measurement, and GEMMs of two stay finite


class TableError(TraincastError):
    """What is wrong with a table as a whole, not with one of its rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table of measurements; `number` counts from 1, the header left out."""

    file: str
    number: int
    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        """The text of a cell."""
        if column not in self.cells:
            raise TableError(f"'{self.file}' has no column '{column}'; it has {format_names(list(self.cells))}")
        return self.cells[column]

    def label(self, column: str) -> str:
        """The text of a cell for the name of a case: short, on one line, printable."""
        text = self[column]
        return text if text.isprintable() and len(text) <= _LONGEST_LABEL else shorten_value(text)

    def positive(self, column: str) -> float:
        """A measured quantity: a finite number above 0."""
        value = self.signed(column)
        if value <= 0:
            raise self._wrong(column, "a number above 0")
        return value

    def signed(self, column: str) -> float:
        """A finite number."""
        try:
            value = float(self[column])
        except ValueError:
            raise self._wrong(column, "a number") from None
        if not abs(value) <= _LARGEST:
            raise self._wrong(column, f"a finite number of at most {_LARGEST:g}")
        return value

    def count(self, column: str) -> int:
        """An integer from 1."""
        value = self.positive(column)
        if value != int(value):
            raise self._wrong(column, "an integer")
        return int(value)

    def known(self, column: str, values: Mapping[str, Value]) -> Value:
        """What a name in this column stands for."""
        name = self[column]
        if name not in values:
            place = f"It stands in '{self.file}', row {self.number}; known are {', '.join(values)}."
            raise make_unknown_error(column, name, values, place)
        return values[name]

    def _wrong(self, column: str, wanted: str) -> TraincastError:
        return TraincastError(
            f"'{self.file}', row {self.number}, column '{column}': {shorten_value(self[column])} is not {wanted}"
        )


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV table of measurements."""
    if not path.is_file():
        raise TableError(f"'{path}' is missing; point `data` at the folder of measurements")
    rows = [Row(path.name, number, cells) for number, cells in enumerate(read_csv(path), start=1)]
    if not rows:
        raise TableError(f"'{path}' has no rows; give at least one measurement")
    return rows


def read_cases(path: Path, case_of: Callable[[Row], Case | None]) -> list[Case | LeftOut]:
    """The case of every row of a table (None: not to be listed); a row without one is left out with the reason."""
    cases: list[Case | LeftOut] = []
    for row in read_rows(path):
        try:
            case: Case | LeftOut | None = case_of(row)
        except TableError:
            raise
        except TraincastError as error:
            case = LeftOut(name=f"{row.file}, row {row.number}", reason=str(error))
        if case is not None:
            cases.append(case)
    return cases

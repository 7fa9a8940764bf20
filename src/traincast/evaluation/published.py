"""Reading the files of published measurements; what is wrong is named by file, row and column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from traincast.errors import TraincastError, unknown
from traincast.files.reading import read_csv

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table of measurements; `number` counts from 1, the header left out."""

    file: str
    number: int
    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        """The text of a cell."""
        if column not in self.cells:
            raise TraincastError(f"'{self.file}' has no column '{column}'; it has {', '.join(self.cells)}")
        return self.cells[column]

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
        if value - value != 0:
            raise self._wrong(column, "a finite number")
        return value

    def count(self, column: str) -> int:
        """A whole number from 1."""
        value = self.positive(column)
        if value != int(value):
            raise self._wrong(column, "a whole number")
        return int(value)

    def known(self, column: str, values: Mapping[str, Value]) -> Value:
        """What a name in this column stands for."""
        name = self[column]
        if name not in values:
            place = f"It stands in '{self.file}', row {self.number}; known are {', '.join(values)}."
            raise unknown(column, name, values, place)
        return values[name]

    def _wrong(self, column: str, wanted: str) -> TraincastError:
        return TraincastError(f"'{self.file}', row {self.number}, column '{column}': {self[column]!r} is not {wanted}")


def rows_of(path: Path) -> list[Row]:
    """The rows of a CSV table of measurements."""
    if not path.is_file():
        raise TraincastError(f"'{path}' is missing; point `data` at the folder of measurements")
    return [Row(path.name, number, cells) for number, cells in enumerate(read_csv(path), start=1)]

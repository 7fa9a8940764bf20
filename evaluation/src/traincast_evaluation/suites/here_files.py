"""What an evaluation on this machine keeps: predictions, written before the first measurement, and measurements, line
by line as they come, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path, parse_json, read_text
from traincast.utils.files.writing import write_json
from traincast_evaluation.trials.catalog import Trial


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a step and the ends of their 90 % interval."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured step: seconds of every repetition and of the reference alongside it, by the wall's clock and in
    processor time. `isolated` are its ops one by one, in units of the reference (0: not measured). It was built and
    measured `visits` times, with other steps in between."""

    step: tuple[float, ...]
    reference: tuple[float, ...]
    busy: tuple[float, ...]
    reference_busy: tuple[float, ...]
    isolated: float = 0.0
    visits: int = 1

    def __add__(self, later: Measured) -> Measured:
        """Both together."""
        return Measured(
            step=self.step + later.step, reference=self.reference + later.reference, busy=self.busy + later.busy,
            reference_busy=self.reference_busy + later.reference_busy, isolated=self.isolated or later.isolated,
            visits=self.visits + later.visits,
        )  # fmt: skip

    def ratios(self, clock: str) -> FloatArray:
        """Every repetition in units of its reference."""
        times, beside = (self.busy, self.reference_busy) if clock == "busy" else (self.step, self.reference)
        return np.asarray(np.array(times) / np.array(beside))

    @staticmethod
    def of(result: Mapping[str, Any]) -> Measured:
        """From what a rank wrote, or from a line of the record."""
        return Measured(
            step=tuple(result["step"]),
            reference=tuple(result["reference"]),
            busy=tuple(result["busy"]),
            reference_busy=tuple(result["reference_busy"]),
            isolated=float(result.get("isolated") or 0.0),
        )


class Record:
    """The files of one evaluation in a folder: `name` and what was predicted make up their names."""

    def __init__(self, folder: Path, name: str, basis: str) -> None:
        """`basis` is what predictions follow from: another one begins a new record."""
        digest = hashlib.blake2b(basis.encode(), digest_size=6).hexdigest()
        self.predictions_path = folder / f"{name}-{digest}-predicted.json"
        self.measurements_path = folder / f"{name}-{digest}-measured.jsonl"

    def read_predictions(self) -> dict[str, Predicted]:
        """By key of the trial; empty before any were written."""
        if not self.predictions_path.exists():
            return {}
        content = parse_json(read_text(self.predictions_path), format_path(self.predictions_path))
        with _reject_damaged_file(self.predictions_path):
            return {key: Predicted(**fields) for key, fields in content["predictions"].items()}

    def write_predictions(self, predictions: Mapping[str, Predicted], trials: Sequence[Trial], basis: str) -> None:
        """All at once, before the first measurement."""
        if self.measurements_path.exists():
            raise AssertionError("predictions are written down before the first measurement")
        content = {
            "basis": basis,
            "trials": [trial.to_dict() for trial in trials],
            "predictions": {key: asdict(predicted) for key, predicted in predictions.items()},
        }
        write_json(self.predictions_path, content)

    def measurements(self) -> dict[str, Measured]:
        """By key of the trial, all its visits together; a last line that was cut off is left out."""
        if not self.measurements_path.exists():
            return {}
        lines = read_text(self.measurements_path).split("\n")[:-1]
        rows = [parse_json(line, format_path(self.measurements_path)) for line in lines]
        with _reject_damaged_file(self.measurements_path):
            found: dict[str, Measured] = {}
            for row in rows:
                one = Measured.of(row)
                found[row["key"]] = found[row["key"]] + one if row["key"] in found else one
            return found

    def add(self, key: str, measured: Measured) -> None:
        """One more measurement, on the disk when this returns."""
        line = json.dumps({"key": key, **asdict(measured)}) + "\n"
        try:
            self._end_last_line()
            with self.measurements_path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TraincastError(f"cannot write '{format_path(self.measurements_path)}': {error.strerror}") from None

    def _end_last_line(self) -> None:
        """Takes a line back that an interrupted run left without its end."""
        if not self.measurements_path.exists():
            return
        with self.measurements_path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


@contextmanager
def _reject_damaged_file(path: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError):
        raise TraincastError(f"'{format_path(path)}' is no record of an evaluation; remove it to begin anew") from None

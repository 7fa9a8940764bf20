"""A sweep run in processes, every point noted in a file as it is done, so that one that is killed goes on from
there."""

from __future__ import annotations

import fcntl
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import Any, TypeGuard

from traincast.ir.workload import Workload
from traincast.planner.what_if.sweeps.points import FIGURES, Grid, Prepared, Sweep, group_points, predict_group
from traincast.planner.what_if.sweeps.result import SweepResult, draw_picture
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import compute_file_digest, format_path, read_document
from traincast.utils.files.writing import check_output, write_together
from traincast.utils.parallel.runner import Died, Job, Workers
from traincast.utils.results import encode_csv
from traincast.utils.version import __version__

_VERSION = 1
_MOST_LINE = 1 << 16


def compute_digest(document: Any) -> str:
    """A short name of what a sweep is: another sweep has another one."""
    return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()


def _format_line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n"


def _is_row(row: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a row has all figures of a point, or says why it has none."""
    if not isinstance(row, dict) or isinstance(row.get("error"), str):
        return isinstance(row, dict)
    return set(FIGURES) <= set(row) and all(_is_figure(name, row[name]) for name in FIGURES)


def _is_figure(name: str, value: Any) -> bool:
    """Whether a point can have such a figure: a verdict, a finite number from 0, or no price."""
    if value is None:
        return name == "dollars_per_million_samples"
    return isinstance(value, int | float) and 0 <= value < math.inf


class Journal:
    """The file of one sweep; opened to be added to, by one process at a time."""

    def __init__(self, out: Path, identity: str, points: int) -> None:
        self.path = out.with_name(out.name + ".points")
        self._points = points
        self._head = {"traincast_sweep": _VERSION, "sweep": identity, "points": points}
        self._file = self._open_file()
        try:
            self.done: dict[int, dict[str, Any]] = self._read()
            if not self._file.tell():
                self._write(_format_line(self._head))
        except BaseException:
            self.close()
            raise

    def _open_file(self) -> io.FileIO:
        """The file, which nobody else writes to as long as it is open."""
        try:
            file = self.path.open("a+b", buffering=0)  # a line is written whole, or its beginning is cut off again
        except OSError as error:
            raise self._make_error(error, "write the result elsewhere") from None
        try:
            # a lock of this process alone, which workers that outlive it do not hold
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise TraincastError(
                f"another sweep is writing '{format_path(self.path)}'; wait until it ends, or write this one elsewhere"
            ) from None
        except OSError:  # a file system without locks
            pass
        return file

    def _make_error(self, error: OSError, remedy: str) -> TraincastError:
        return TraincastError(f"cannot write '{format_path(self.path)}': {error.strerror or error}; {remedy}")

    def _read(self) -> dict[int, dict[str, Any]]:
        """Points of an earlier run. A last line that was cut short is not one."""
        done: dict[int, dict[str, Any]] = {}
        whole = 0
        self._file.seek(0)
        reader = io.BufferedReader(self._file)
        for number, line in enumerate(reader):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            entry = self._parse_line(line)
            if number == 0:
                self._check(entry)
                continue
            point, row = entry.get("point"), entry.get("row")
            if type(point) is int and 0 <= point < self._points and _is_row(row):
                done[point] = row
        reader.detach()  # else it closes the file with itself
        self._file.truncate(whole)
        self._file.seek(whole)
        return done

    def _parse_line(self, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line[:_MOST_LINE])
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise self._make_foreign_error()
        return entry

    def _check(self, head: dict[str, Any]) -> None:
        if head != self._head:
            raise self._make_foreign_error()

    def _make_foreign_error(self) -> TraincastError:
        name = format_path(self.path)
        return TraincastError(f"'{name}' is the journal of another sweep; delete it, or write this one elsewhere")

    def add(self, points: Sequence[int], rows: Sequence[dict[str, Any]]) -> None:
        """Points are done: they are in the file when this returns."""
        self._write(
            "".join(_format_line({"point": point, "row": row}) for point, row in zip(points, rows, strict=True))
        )
        self.done.update(zip(points, rows, strict=True))

    def _write(self, text: str) -> None:
        left = text.encode()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._make_error(error, "points so far are kept: the same command goes on from them") from None

    def close(self) -> None:
        """The file stays, to go on from."""
        self._file.close()

    def remove(self) -> None:
        """The result is written: the file is no longer needed."""
        self.path.unlink(missing_ok=True)
        self._file.close()


SUFFIXES = (".csv", ".parquet")


def run_sweep(
    resolved: Resolved,
    grid: Grid,
    *,
    out: Path | None = None,
    image: Path | None = None,
    prices: dict[str, float] | None = None,
    workers: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> SweepResult:
    """Predicts every point of a grid. `out` (.csv, .parquet) receives the rows, and alongside it, while the sweep runs,
    a journal from which it goes on after an interruption; `image` a picture (.svg)."""
    _check_files(out, image)
    where = Workers(processes=workers)
    began = monotonic()
    points = list(grid)
    settled = Sweep(resolved=resolved, names=grid.names, prices=prices or {})
    journal = None if out is None else Journal(out, _describe_identity(settled, grid), len(points))
    done = {} if journal is None else journal.done
    resumed = len(done)
    left = [number for number in range(len(points)) if number not in done]

    runs = group_points(grid.names, [points[number] for number in left])

    def heard(place: int, outcome: Any) -> None:
        numbers = left[slice(*runs[place])]
        rows = [{"error": outcome.reason}] * len(numbers) if isinstance(outcome, Died) else outcome
        if journal is None:
            done.update(zip(numbers, rows, strict=True))
        else:
            journal.add(numbers, rows)
        progress(len(done) / len(points))

    job = Job(prepare=Prepared, given=settled, work=predict_group)
    tasks = [tuple(points[number] for number in left[slice(*each)]) for each in runs]
    try:
        where.run_tasks(job, tasks, heard)
    except BaseException:
        if journal is not None:
            journal.close()
        raise
    rows = [_make_row(grid, point, done[n]) for n, point in enumerate(points)]
    result = SweepResult(
        name=resolved.name, sweep=settled, grid=grid, rows=rows, resumed=resumed, workers=where.describe(len(tasks)),
        seconds=monotonic() - began,
    )  # fmt: skip
    _write_files(result, out, image)
    if journal is not None:
        journal.remove()
    return result


def _check_files(out: Path | None, image: Path | None) -> None:
    for path, suffixes in ((out, SUFFIXES), (image, (".svg",))):
        if path is not None:
            if path.suffix not in suffixes:
                raise TraincastError(f"'{path.name}' must end in {' or '.join(suffixes)}")
            check_output(path)
    if out is not None and out.suffix == ".parquet":
        try:
            import polars  # noqa: F401
        except ImportError:
            raise TraincastError("Parquet needs polars: pip install 'traincast[data]', or write .csv") from None


def _describe_identity(settled: Sweep, grid: Grid) -> str:
    """What makes a sweep the same one: the step, the platform, all options, the axes, the files that they name, and
    the version that predicts."""
    resolved, workload = settled.resolved, settled.resolved.scenario.workload
    files = [workload, *_list_named_files(workload)] if isinstance(workload, str) else []
    files += [value for name, values in grid.axes if name in ("on", "plan") for value in values]
    described = {
        "version": __version__,
        "workload": _read_content(workload) if isinstance(workload, Workload) else str(workload),
        "files": {name: compute_file_digest(name) for name in files},
        "scenario": repr((resolved.platform, resolved.scenario.replace(workload=""), resolved.costs, resolved.host)),
        "axes": [[name, list(values)] for name, values in grid.axes], "prices": settled.prices,
    }  # fmt: skip
    return compute_digest(described)


def _list_named_files(workload: str) -> list[str]:
    """Files of raw indices that a description of a model names, from its own folder."""
    path = Path(workload)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return []
    found, pending = [], [read_document(path)]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            found += [str(path.parent / value) for name, value in part.items() if name == "indices" and value]
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return sorted(found)


def _read_content(workload: Workload) -> list[Any]:
    """What a workload holds."""
    return [
        workload.name, workload.mode, list(workload.ranks),
        [[compute_digest(repr((p.symbolic, p.names, p.batch_size, p.seq_len))),
          compute_digest([getattr(p.columns, one.name).tobytes().hex() for one in fields(p.columns)]),
          compute_digest(p.sizes.coefficients.tolist())] for p in workload.programs],
    ]  # fmt: skip


def _write_files(result: SweepResult, out: Path | None, image: Path | None) -> None:
    contents: dict[Path, bytes] = {}
    if out is not None:
        is_csv = out.suffix == ".csv"
        columns = (*result.grid.names, *FIGURES, "error")
        contents[out] = encode_csv(result.rows, columns) if is_csv else _encode_parquet(result)
    if image is not None:
        contents[image] = draw_picture(result).encode()
    write_together(contents)


def _make_row(grid: Grid, point: Sequence[str], figures: dict[str, Any]) -> dict[str, Any]:
    """A point with its figures; values of an axis that has integers only are integers."""
    counts = {name for name, values in grid.axes if all(value.isascii() and value.isdecimal() for value in values)}
    values = zip(grid.names, point, strict=True)
    return {name: int(value) if name in counts else value for name, value in values} | figures


def _encode_parquet(result: SweepResult) -> bytes:
    import polars as pl

    first = result.rows[0] if result.rows else {}
    schema: dict[str, Any] = {
        name: pl.Int64 if isinstance(first.get(name), int) else pl.String for name in result.grid.names
    }
    schema |= {name: pl.Boolean if name == "fits" else pl.Float64 for name in FIGURES}
    schema["error"] = pl.String
    columns = {name: [row.get(name) for row in result.rows] for name in schema}
    frame = pl.DataFrame(columns, schema=schema)
    data = io.BytesIO()
    frame.write_parquet(data)
    return data.getvalue()

"""A sweep run: what is left of it in processes, every point noted as it is done, the table at the end."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from time import monotonic
from typing import Any

from traincast.ir.workload import Workload
from traincast.planner.what_if.sweeps.grid import Grid
from traincast.planner.what_if.sweeps.journal import Journal, compute_digest
from traincast.planner.what_if.sweeps.picture import draw_picture
from traincast.planner.what_if.sweeps.points import FIGURES, Prepared, Sweep, group_points, predict_group
from traincast.planner.what_if.sweeps.result import SweepResult
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import compute_file_digest, read_document
from traincast.utils.files.writing import check_output, write_bytes
from traincast.utils.parallel.runner import Died, Job, Workers
from traincast.utils.results import encode_csv
from traincast.utils.version import __version__

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
    if out is not None:
        if out.suffix == ".csv":
            write_bytes(out, encode_csv(result.rows, (*result.grid.names, *FIGURES, "error")))
        else:
            _write_parquet(out, result)
    if image is not None:
        write_bytes(image, draw_picture(result).encode())


def _make_row(grid: Grid, point: Sequence[str], figures: dict[str, Any]) -> dict[str, Any]:
    """A point with its figures; values of an axis that has integers only are integers."""
    counts = {name for name, values in grid.axes if all(value.isascii() and value.isdecimal() for value in values)}
    values = zip(grid.names, point, strict=True)
    return {name: int(value) if name in counts else value for name, value in values} | figures


def _write_parquet(out: Path, result: SweepResult) -> None:
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
    write_bytes(out, data.getvalue())

"""The kernels of one DLRM step against the study's timeline, op by op: durations without any host effect.

V100 at its locked 1297 MHz, batch 2048. No fitted parameter saw these rows; a few constants of the streaming and
embedding models were chosen with them in view (docs/evidence/kernels.md, docs/evidence/one-gpu.md).
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np

from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.timeline import Timeline
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow, compute_error_row
from traincast_evaluation.measured_tables import read_table

_SUITE = "dlrm_kernel_timeline_v100"
_FILE = f"kernels/{_SUITE}.parquet"
_SNAPSHOTS = (("2021-08-22", "DLRM_default", "dlrm-default"), ("2021-05-14", "DLRM_MLPerf", "dlrm-mlperf"))
# until mid-2021 PyTorch copied the index lists of the interaction before the gather, since then within it
_EARLIER_COPIES = "module::forward_pass::interaction > aten::to"
_BATCH, _CLOCK_MHZ = 2048, 1297.0
_LONG_US = 50.0  # shorter kernels are mostly launch


def evaluate_dlrm_timeline(data: Path) -> list[ErrorRow]:
    """Per model: every op that launches kernels, those above 50 us, and the sum of all."""
    rows = []
    for snapshot, model, name in _SNAPSHOTS:
        measured = _read_measured_kernels(data, snapshot)
        result = predict(Scenario(workload=name, on="v100", batch_size=_BATCH, clock_mhz=_CLOCK_MHZ))
        predicted = _list_predicted_kernels(result.timeline)
        if len(predicted) != len(measured):
            raise TraincastError(
                f"'{_FILE}', snapshot {snapshot}: {len(measured)} ops launch kernels, of {name} {len(predicted)} do; "
                "give the whole table"
            )
        names = [f"{op} #{i}" for i, (op, _) in enumerate(measured)]
        ours, theirs = np.array(predicted), np.array([us for _, us in measured])
        long = np.flatnonzero(theirs > _LONG_US)
        rows += [
            compute_error_row(_SUITE, f"{model}: each op", ours, theirs, names),
            compute_error_row(_SUITE, f"{model}: ops above 50 us", ours[long], theirs[long], [names[i] for i in long]),
            compute_error_row(_SUITE, f"{model}: sum of kernels", [ours.sum()], [theirs.sum()], [model]),
        ]
    return rows


def _read_measured_kernels(data: Path, snapshot: str) -> list[tuple[str, float]]:
    """(top-level op, microseconds of its kernels) in launch order."""
    numbers = ["position", "op_occurrence", "duration_us_median"]
    table = read_table(data, _FILE, ["snapshot", "op_path"], numbers, positive=["duration_us_median"])
    columns = [table.text("op_path"), *(table.number(name) for name in numbers)]
    rows = [
        (str(path), position, occurrence, microseconds)
        for of_snapshot, path, position, occurrence, microseconds in zip(table.text("snapshot"), *columns, strict=True)
        if of_snapshot == snapshot and not str(path).endswith(_EARLIER_COPIES)
    ]
    rows.sort(key=lambda row: row[1])
    return [
        (path.rsplit(" > ", 1)[-1], sum(row[3] for row in group))
        for (path, _), group in groupby(rows, key=lambda row: (row[0], row[2]))
    ]


def _list_predicted_kernels(timeline: Timeline) -> list[float]:
    """Microseconds of the kernels of every top-level op that launches any, in launch order."""
    scope = timeline.schedule.scope[timeline.launches]
    totals = np.bincount(scope, weights=1e6 * timeline.kernel_seconds)
    scope_totals: list[float] = totals[np.unique(scope)].tolist()
    return scope_totals

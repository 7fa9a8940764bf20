"""A host profile from the published overhead tables of the DLRM and CNN study.

T2 comes from `t1_t2_by_op_model.csv` (2022-02, seven models), each op's median over all samples. T1 is published there
as a mean over the gaps that passed a filter (same module, longer than the profiler's own cost); what a step needs is
the time of all its gaps, so the published total per traced step is spread over the top-level ops of the captured
programs, by who issues them. T3, T4 and T5 exist only in the older `t1_to_t5_v100_dlrm_default.csv`, taken with an
older PyTorch; T3, T5 and the ops that launch nothing are carried over to the newer one by one ratio each. Both kinds of
ratio come from traces (`host_versions.py`). T4 is published as the profiler saw it; the profiler's own cost, as the
study states it, is taken off here.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traincast.costs.host.profile import get_issuer
from traincast.models.catalog import load_model
from traincast.utils.errors import TraincastError
from traincast_evaluation.fitting.host_versions import SOURCES, read_ratios

PROFILE = "study-2022"
_BY_MODEL = "overheads/t1_t2_by_op_model.csv"
_BY_TYPE = "overheads/t1_to_t5_v100_dlrm_default.csv"
# the study's batch sizes; 256, 8192 and 16384 were taken on another, multi-GPU host
_BATCHES = {8, 16, 32, 64, 128, 512, 1024, 2048, 4096}
_NEWER_COLUMNS = ("type", "op", "model", "batch", "mean_us", "count")
_WHOLE = ("batch", "count")
_TYPES = ("T1", "T2", "T3", "T4", "T5")
_MODELS = {
    "DLRM_default": "dlrm-default", "DLRM_MLPerf": "dlrm-mlperf", "DLRM_DDP": "dlrm-ddp",
    "resnet50": "resnet50", "inception_v3": "inception-v3",
}  # fmt: skip
_ONCE_A_STEP = {
    "LookupFunction", "BmmBackward0", "IndexBackward0", "TransposeBackward0", "ViewBackward0", "aten::bmm",
    "aten::cross_entropy_loss", "MeanBackward1", "LogSoftmaxBackward0", "NllLossBackward0",
}  # fmt: skip
# names that autograd nodes had before PyTorch 1.9
_RENAMED = {
    "AddmmBackward": "AddmmBackward0", "IndexBackward": "IndexBackward0", "MseLossBackward": "MseLossBackward0",
    "SigmoidBackward": "SigmoidBackward0", "SliceBackward": "SliceBackward0", "CatBackward": "CatBackward0",
    "TBackward": "TBackward0", "ViewBackward": "ViewBackward0",
}  # fmt: skip
_PROFILER_US = 2.0 + 4.0  # the study's cost of one host event and of one device event, both inside a traced launch call
_HOST_ONLY = ("CatBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "aten::broadcast_tensors",
              "aten::detach", "aten::detach_", "aten::empty", "aten::ones", "aten::slice", "aten::transpose",
              "aten::view", "aten::zeros")  # fmt: skip


def fit_host(data: Path, out: Path, progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Writes the host profile `study-2022.json` into `out` and returns it."""
    progress("host overheads", 0.0)
    profile = build_study_profile(data)
    (out / f"{PROFILE}.json").write_text(json.dumps(profile, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return profile


def build_study_profile(data: Path) -> dict[str, Any]:
    """The profile in its JSON form, microseconds."""
    newer = [row for row in _read_overhead_rows(data / _BY_MODEL, _NEWER_COLUMNS) if int(row["batch"]) in _BATCHES]
    t2, spread = _compute_t2(newer)
    older = _read_older_tables(data / _BY_TYPE)
    ratios = read_ratios(data, t2, older)
    t3, t5, alone = ({op: ratios.newer[kind] * us for op, us in older[kind].items()} for kind in ("T3", "T5", "alone"))
    launch = older["T4"]["cudaLaunchKernel"] - _PROFILER_US
    profile = {
        "t1_us": _compute_t1(newer, ratios.t1),
        "t2_us": _add_defaults(t2),
        "t3_us": _add_defaults(t3),
        "t4_us": {
            "launch": launch,
            "memcpy": older["T4"]["cudaMemcpyAsync"] - _PROFILER_US,
            "memset": launch,
            "synchronize": launch,
        },
        "t5_us": _add_defaults(t5),
        "alone_us": _add_defaults(alone),
        "spread": spread,
        "provenance": {
            "sources": ["owensgroup/ml_perf_model @ 5b2522a0 (BSD-3-Clause)", *SOURCES],
            "host": "the authors' V100 host, CPU turbo off; CPU not stated",
            "newer_over_older": ratios.newer,
            "rows": {_BY_MODEL: len(t2), _BY_TYPE: sum(len(table) for table in older.values())},
        },
    }
    rounded: dict[str, Any] = json.loads(json.dumps(profile), parse_float=lambda text: round(float(text), 3))
    return rounded


def _compute_t2(rows: list[dict[str, str]]) -> tuple[dict[str, float], float]:
    """T2 per op: the median over all samples, each (model, batch) mean standing for its own; and how far models scatter
    around it (standard deviation of the logarithm), which is what sharing a profile costs.

    The median keeps out what is particular to one model: the prelude of an optimizer step grows with its parameters,
    and with 160 of them (CNNs) it is five times that of a DLRM.
    """
    by_op: dict[str, dict[str, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["type"] == "T2":
            by_op[row["op"]][row["model"]].append((float(row["mean_us"]), int(row["count"])))
    pooled, scatter = {}, []
    for op, models in by_op.items():
        pooled[op] = _compute_weighted_median([each for samples in models.values() for each in samples])
        means = [statistics.fmean(us for us, _ in samples) for samples in models.values()]
        scatter += [math.log(mean / pooled[op]) ** 2 for mean in means if len(means) > 1]
    return pooled, math.sqrt(statistics.fmean(scatter))


def _compute_weighted_median(samples: list[tuple[float, int]]) -> float:
    """The median of (value, how often) pairs."""
    half = sum(count for _, count in samples) / 2
    reached = 0
    for value, count in sorted(samples):
        reached += count
        if reached >= half:
            return value
    raise AssertionError("no samples")


def _compute_t1(rows: list[dict[str, str]], ratios: dict[str, float]) -> dict[str, float]:
    """T1 by issuer: the published total per step over the ops of the captured programs, weighted by `ratios`.

    The median over models of each model's median over batch sizes.
    """
    steps: dict[tuple[str, str], int] = defaultdict(int)
    gaps: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["model"], row["batch"]
        if row["op"] in _ONCE_A_STEP:  # outliers were dropped upstream, so the largest count is the number of steps
            steps[key] = max(steps[key], int(row["count"]))
        if row["type"] == "T1" and row["model"] in _MODELS:
            gaps[key] = float(row["mean_us"]) * int(row["count"])
    by_model: dict[str, list[float]] = defaultdict(list)
    for (model, batch), total in gaps.items():
        by_model[model].append(total / steps[model, batch])
    python = statistics.median(
        statistics.median(totals) / _count_weighted_ops(_MODELS[model], ratios) for model, totals in by_model.items()
    )
    return {name: ratio * python for name, ratio in ratios.items()}


def _count_weighted_ops(name: str, ratios: dict[str, float]) -> float:
    """Top-level ops of a built-in model, each counted as often as its T1 is Python's."""
    scopes = load_model(name).programs[0].scopes
    return sum(ratios[get_issuer(scope.name, main=scope.thread == 0)] for scope in scopes)


def _read_older_tables(path: Path) -> dict[str, dict[str, float]]:
    """Type -> op -> mean over the snapshots; "alone" is the T5 of ops that launch nothing.

    aten::to only from 2022-01, where its wait is not counted as T3. A T5 of nothing means that there is one launch.
    """
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in _read_overhead_rows(path, ("snapshot", "type", "op", "mean_us")):
        if row["op"] != "aten::to" or row["snapshot"] == "2022-01":
            op = _RENAMED.get(row["op"], row["op"])
            kind = "alone" if row["type"] == "T5" and op in _HOST_ONLY else row["type"]
            values[kind, op].append(float(row["mean_us"]))
    tables: dict[str, dict[str, float]] = defaultdict(dict)
    for (kind, op), us in values.items():
        mean = statistics.fmean(us)
        if mean > 0 or kind != "T5":
            tables[kind][op] = mean
    return tables


def _read_overhead_rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a table whose overheads, batches and counts are numbers; rejected by file, row and column."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise TraincastError(f"'{path.name}' lacks the column '{missing[0]}'")
            rows = list(reader)
    except FileNotFoundError:
        raise TraincastError(f"'{path.name}' is missing; point `data` at the folder of measurements") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraincastError(f"cannot read '{path.name}': {error}") from None
    if not rows:
        raise TraincastError(f"'{path.name}' has no rows")
    for number, row in enumerate(rows):
        for name in columns:
            _check_cell(f"'{path.name}', row {number}, column '{name}'", name, row[name])
    return rows


def _check_cell(where: str, column: str, text: str | None) -> None:
    if text is None:
        raise TraincastError(f"{where}: the line ends before it")
    if column == "type" and text not in _TYPES:
        raise TraincastError(f"{where}: {text!r} is none of {', '.join(_TYPES)}")
    if column in _WHOLE and not (text.isdecimal() and int(text)):
        raise TraincastError(f"{where}: {text!r} is not an integer above zero")
    if column == "mean_us":
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise TraincastError(f"{where}: {text!r} is not a time in microseconds")


def _add_defaults(table: dict[str, float]) -> dict[str, float]:
    """The table with medians for autograd nodes ("*Backward") and other ops ("*") that nobody measured."""
    ops = [us for op, us in table.items() if op.startswith("aten::")]
    nodes = [us for op, us in table.items() if "Backward" in op]
    return {**dict(sorted(table.items())), "*": statistics.median(ops), "*Backward": statistics.median(nodes)}

"""A host profile from the published overhead tables of the DLRM and CNN study.

T2 comes from `t1_t2_by_op_model.csv` (2022-02, seven models), each op's median over the models. T1 is published there
as a mean over the gaps that passed a filter (same module, longer than the profiler's own cost); what a step needs is
the time of all its gaps, so the published total per traced step of the three DLRMs is spread over the top-level ops of
their captured programs. T3, T4 and T5 exist only in the older `t1_to_t5_v100_dlrm_default.csv`, taken with an older
PyTorch. T3 and T5 of an op are carried over to the newer one by the ratio of its own T2 in the two tables (the median
ratio where an op is in one table only). T4 is published as the profiler saw it; the profiler's own cost, as the study
states it, is taken off here.
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

from traincast.errors import TraincastError
from traincast.models.catalog import load_model

PROFILE = "study-2022"
_BY_MODEL = "overheads/t1_t2_by_op_model.csv"
_BY_TYPE = "overheads/t1_to_t5_v100_dlrm_default.csv"
# the study's batch sizes; 256, 8192 and 16384 were taken on another, multi-GPU host
_BATCHES = {8, 16, 32, 64, 128, 512, 1024, 2048, 4096}
_NEWER_COLUMNS = ("type", "op", "model", "batch", "mean_us", "count")
_DLRMS = {"DLRM_default": "dlrm-default", "DLRM_MLPerf": "dlrm-mlperf", "DLRM_DDP": "dlrm-ddp"}
_ONCE_A_STEP = {"LookupFunction", "BmmBackward0", "IndexBackward0", "TransposeBackward0", "ViewBackward0", "aten::bmm"}
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
    profile = host_tables(data)
    (out / f"{PROFILE}.json").write_text(json.dumps(profile, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return profile


def host_tables(data: Path) -> dict[str, Any]:
    """The profile in its JSON form, microseconds."""
    newer = [row for row in _rows(data / _BY_MODEL, _NEWER_COLUMNS) if int(row["batch"]) in _BATCHES]
    t1, (t2, spread) = _t1(newer), _t2(newer)
    older = _older(data / _BY_TYPE)
    ratios = {op: t2[op] / us for op, us in older["T2"].items() if op in t2}
    ratio = statistics.median(ratios.values())
    t3 = {op: ratios.get(op, ratio) * us for op, us in older["T3"].items()}
    t5 = {op: ratios.get(op, ratio) * us for op, us in older["T5"].items() if op not in _HOST_ONLY and us > 0}
    alone = {op: ratio * us for op, us in older["T5"].items() if op in _HOST_ONLY}
    alone["torch::autograd::AccumulateGrad"] = t2["torch::autograd::AccumulateGrad"]
    launch = older["T4"]["cudaLaunchKernel"] - _PROFILER_US
    profile = {
        "t1_us": t1,
        "t2_us": _with_defaults(t2),
        "t3_us": _with_defaults(t3),
        "t4_us": {
            "launch": launch,
            "memcpy": older["T4"]["cudaMemcpyAsync"] - _PROFILER_US,
            "memset": launch,
            "synchronize": launch,
        },
        "t5_us": _with_defaults(t5),
        "alone_us": _with_defaults(alone),
        "spread": spread,
        "provenance": {
            "sources": ["owensgroup/ml_perf_model @ 5b2522a0 (BSD-3-Clause)"],
            "host": "the authors' V100 host, CPU turbo off; CPU not stated",
            "older_to_newer_ratio": ratio,
            "rows": {_BY_MODEL: len(t2), _BY_TYPE: sum(len(table) for table in older.values())},
        },
    }
    rounded: dict[str, Any] = json.loads(json.dumps(profile), parse_float=lambda text: round(float(text), 3))
    return rounded


def _t2(rows: list[dict[str, str]]) -> tuple[dict[str, float], float]:
    """T2 per op: each model's mean over its batch sizes, then the median over models; and how far models scatter
    around that median (standard deviation of the logarithm), which is what sharing a profile costs.

    The median keeps out what is particular to one model: the prelude of an optimizer step grows with its parameters,
    and with 160 of them (CNNs) it is five times that of a DLRM.
    """
    by_op: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["type"] == "T2":
            by_op[row["op"]][row["model"]].append(float(row["mean_us"]))
    pooled, scatter = {}, []
    for op, models in by_op.items():
        means = [statistics.fmean(values) for values in models.values()]
        pooled[op] = statistics.median(means)
        scatter += [math.log(mean / pooled[op]) ** 2 for mean in means if len(means) > 1]
    return pooled, math.sqrt(statistics.fmean(scatter))


def _t1(rows: list[dict[str, str]]) -> float:
    """T1 per top-level op of the captured DLRMs: the median over models and batch sizes."""
    steps: dict[tuple[str, str], int] = defaultdict(int)
    gaps: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["model"], row["batch"]
        if row["op"] in _ONCE_A_STEP:  # outliers were dropped upstream, so the largest count is the number of steps
            steps[key] = max(steps[key], int(row["count"]))
        if row["type"] == "T1" and row["model"] in _DLRMS:
            gaps[key] = float(row["mean_us"]) * int(row["count"])
    scopes = {model: load_model(name).programs[0].num_scopes for model, name in _DLRMS.items()}
    return statistics.median(total / steps[key] / scopes[key[0]] for key, total in gaps.items())


def _older(path: Path) -> dict[str, dict[str, float]]:
    """Type -> op -> mean over the snapshots; aten::to only from 2022-01, where its wait is not counted as T3."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in _rows(path, ("snapshot", "type", "op", "mean_us")):
        if row["op"] != "aten::to" or row["snapshot"] == "2022-01":
            values[row["type"], _RENAMED.get(row["op"], row["op"])].append(float(row["mean_us"]))
    tables: dict[str, dict[str, float]] = defaultdict(dict)
    for (kind, op), us in values.items():
        tables[kind][op] = statistics.fmean(us)
    return tables


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise TraincastError(f"{path.name} lacks the column '{missing[0]}'")
            return list(reader)
    except FileNotFoundError:
        raise TraincastError(f"{path.name} is missing; point --data at the folder of measurements") from None


def _with_defaults(table: dict[str, float]) -> dict[str, float]:
    """The table with medians for autograd nodes ("*Backward") and other ops ("*") that nobody measured."""
    ops = [us for op, us in table.items() if op.startswith("aten::")]
    nodes = [us for op, us in table.items() if "Backward" in op]
    return {**dict(sorted(table.items())), "*": statistics.median(ops), "*Backward": statistics.median(nodes)}

"""What measured traces say, as data frames (polars). Times are milliseconds or microseconds, as the columns say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traincast.errors import TraincastError
from traincast.replay.analysis import RankReport, TraceReport
from traincast.report.measured import measured_json
from traincast.traces.classify import kernel_family

if TYPE_CHECKING:
    import polars as pl


def trace_frames(report: TraceReport) -> dict[str, pl.DataFrame]:
    """Frames by name: "steps", "kernels", "overheads", "collectives", "critical_path" and, where the run was predicted,
    "prediction" (a row a step); of several ranks also "together" (a row a step, replayed and predicted with all ranks)
    and "path_over_ranks". Every frame has a column `rank`."""
    try:
        import polars as pl
    except ImportError:
        raise TraincastError("data frames need polars: pip install 'traincast[data]'") from None
    document = measured_json(report)
    tables: dict[str, list[dict[str, Any]]] = {
        "steps": [], "kernels": [], "overheads": [], "collectives": [], "critical_path": [], "prediction": [],
    }  # fmt: skip
    for rank, entry in zip(report.ranks, document["ranks"], strict=True):
        own = {"rank": rank.rank}
        tables["steps"] += [{**own, **_flat(step)} for step in entry["steps"]]
        tables["kernels"] += [{**own, **row} for row in _kernels(rank)]
        tables["overheads"] += [
            {**own, "type": kind, "op": op, **{f"{key}_us" if key != "count" else key: v for key, v in summary.items()}}
            for kind, ops in entry["overheads_us"].items()
            for op, summary in ops.items()
        ]
        tables["collectives"] += [{**own, **row} for row in entry["collectives"]]
        tables["critical_path"] += [{**own, **row} for row in entry["critical_path"]["segments"]]
        if entry["prediction"]:
            tables["prediction"] += [{**own, **_flat(step), **step["shares"]} for step in entry["prediction"]["steps"]]
    tables |= _together(document["together"] or {})
    return {name: pl.DataFrame(rows, infer_schema_length=None) for name, rows in tables.items() if rows}


def _together(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    replay, path, prediction = (document.get(name) or {} for name in ("replay", "critical_path", "prediction"))
    steps = [{"rank": own["rank"], **step} for own in replay.get("ranks", ()) for step in own["steps"]]
    predicted = {(s["rank"], s["number"]): {**_flat(s), **s["shares"]} for s in prediction.get("steps", ())}
    rows = [{**step, **predicted.get((step["rank"], step["number"]), {})} for step in steps]
    return {"together": rows, "path_over_ranks": path.get("segments", [])}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, (dict, list))}


def _kernels(rank: RankReport) -> list[dict[str, Any]]:
    """A row a kernel: measured, and predicted where the run was predicted."""
    linked, found = rank.linked, rank.attribution
    predicted = dict(zip(found.kernels.row.tolist(), found.kernels.predicted.tolist(), strict=True)) if found else {}
    rows = []
    for row in linked.device.tolist():
        launch = int(linked.launch[row])
        scope = int(linked.scope[launch]) if launch >= 0 else -1
        entry = {
            "step": int(linked.step[row]), "stream": int(linked.events["stream"][row]), "name": linked.name(row),
            "family": kernel_family(linked.name(row)), "op": linked.name(scope) if scope >= 0 else "",
            "start_us": 1e-3 * (int(linked.events["start"][row]) - rank.replay.origin),
            "length_us": 1e-3 * int(linked.events["duration"][row]),
        }  # fmt: skip
        if found:
            entry["predicted_us"] = 1e6 * predicted[row] if row in predicted else None
        rows.append(entry)
    return rows

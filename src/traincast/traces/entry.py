"""Traces asked about by the names of files and platforms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traincast.hardware.platform import Platform, load_platform
from traincast.traces.replay.against import compare_with_prediction, is_saved_prediction, read_prediction
from traincast.traces.replay.analysis import TraceOptions, analyse_traces
from traincast.traces.replay.compare import TraceComparison, compare_reports
from traincast.traces.replay.results import TraceReport
from traincast.utils.errors import TraincastError


def analyse_trace_files(
    files: Sequence[str | Path],
    *,
    on: str | Platform | None,
    host: str | None,
    host_scale: float | None,
    twice: Sequence[str],
    step_marker: str = "",
) -> TraceReport:
    """What the traces say, and with a platform `on` how a prediction of them compares."""
    if on is None and (host is not None or host_scale != 1.0):
        raise TraincastError("`host` and `host_scale` belong to a prediction: add `on`")
    platform = load_platform(on) if isinstance(on, str) else on
    request = TraceOptions(
        platform=platform, host=host, host_scale=host_scale, twice=tuple(twice), step_marker=step_marker
    )
    return analyse_traces(files, request)


def compare_traces(before: str | Path, after: str | Path, *, step_marker: str = "") -> TraceComparison:
    """What changed from one traced run, or from the saved prediction of a run, to another."""
    request, first = TraceOptions(step_marker=step_marker), Path(before)
    predicted = read_prediction(first) if is_saved_prediction(first) else None
    if is_saved_prediction(Path(after)):
        raise TraincastError(f"'{after}' is a prediction: give it first and the traced run second")
    report = analyse_traces([after], request)
    if predicted is not None:
        return compare_with_prediction(predicted, report)
    return compare_reports(analyse_traces([before], request), report)

"""Trace files read, measured, replayed and, on a platform, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.hardware.links import add_default_links
from traincast.hardware.platform import Platform, load_platform
from traincast.traces.breakdown import combine_ranks, compute_breakdown
from traincast.traces.collectives import find_collectives, match_collectives
from traincast.traces.events import Kind
from traincast.traces.execution import join_execution
from traincast.traces.formats import RankTraces, read_ranks
from traincast.traces.link import Linked, link_trace
from traincast.traces.overheads.extraction import Overheads, measure_overheads
from traincast.traces.profiler.communication import make_shared_communication_rows
from traincast.traces.profiler.tables import profile_tables
from traincast.traces.replay.against import compare_with_prediction, is_saved_prediction, read_prediction
from traincast.traces.replay.attribution import Attribution, attribute_error, choose_profile, compute_host_scale
from traincast.traces.replay.compare import TraceComparison, compare_reports
from traincast.traces.replay.notes import (
    launch_notes,
    note_devices,
    note_execution,
    note_missing_ranks,
    note_recording,
    note_slow_steps,
    replay_notes,
    step_notes,
)
from traincast.traces.replay.path import find_ranks_path, make_path_report
from traincast.traces.replay.results import RankReport, TogetherReport, TraceReport
from traincast.traces.replay.steps import simulate_replay
from traincast.traces.replay.timeline import TimelineInstructions, make_timeline_instructions
from traincast.traces.replay.together import predict_ranks, replay_ranks
from traincast.traces.signatures import SignatureReader
from traincast.traces.slowdowns import compute_slowdowns
from traincast.utils.errors import TraincastError

PLATFORM_HOST = "platform"
"""The host profile of a question that means the platform's own."""


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What else to find out: the prediction on `platform`, and gains of ops or families in `twice`.

    The host's times are the trace's own, or with `host` those of that profile ("platform": the platform's own),
    `host_scale` times as long (None: as the trace's own launch calls say; without `host` the platform's profile).
    Steps begin at ops or annotations called `step_marker` (see `traces.markers`).
    """

    platform: Platform | None = None
    host: str | None = None
    host_scale: float | None = None
    twice: tuple[str, ...] = ()
    step_marker: str = ""


def analyse_traces(paths: Sequence[str | Path], request: TraceOptions | None = None) -> TraceReport:
    """Reads trace files or folders of ranks and measures everything in them."""
    request = request or TraceOptions()
    given = [traces for traces in read_ranks(paths) if traces.timeline]
    ranks = tuple(
        _analyse_rank(traces, link_trace(traces.timeline, request.step_marker), request, alone=len(given) == 1)
        for traces in given
        if traces.timeline
    )
    if not ranks:
        raise TraincastError("only execution traces were given; a measured step needs a Kineto trace too")
    return TraceReport(ranks=ranks, together=_analyse_together(ranks, request) if len(ranks) > 1 else None)


def _analyse_together(ranks: Sequence[RankReport], request: TraceOptions) -> TogetherReport:
    numbers, linked = tuple(report.rank for report in ranks), [report.linked for report in ranks]
    matches = match_collectives(linked, [report.collectives for report in ranks])
    notes = [*note_missing_ranks([(one.rank, one.linked.trace.world_size) for one in ranks]), *matches.notes]
    launched = all(one.launched for one in linked)
    replayed = replay_ranks(
        linked, [report.instructions for report in ranks], matches, [report.steps for report in ranks]
    ) if launched else None  # fmt: skip
    path, prediction = None, None
    if replayed is None:
        why = "contradict each other" if matches.collectives else "have no collective in common"
        why = why if launched else "have no launches of their kernels"
        notes.append(f"the ranks cannot be replayed together: they {why}")
    else:
        path = find_ranks_path(numbers, linked, replayed.walked, request.twice)
        attributions = [report.attribution for report in ranks if report.attribution is not None]
        if request.platform is not None:
            platform = add_default_links(request.platform)
            notes += [platform.assumed] if platform.assumed else []
            if platform.topology is not None:
                prediction = predict_ranks(linked, attributions, replayed, platform.topology)
    return TogetherReport(
        numbers=numbers,
        breakdown=combine_ranks([report.steps for report in ranks]),
        exchanges=make_shared_communication_rows(matches, numbers),
        replay=replayed,
        path=path,
        prediction=prediction,
        notes=tuple(notes),
    )


def _analyse_rank(traces: RankTraces, linked: Linked, request: TraceOptions, *, alone: bool) -> RankReport:
    rank, execution = traces.rank, traces.execution
    notes = list(linked.trace.notes)
    joined, node = None, None
    if execution is not None:
        notes += execution.notes
        node = join_execution(linked, execution)
        ops = linked.host[linked.events["kind"][linked.host] == Kind.OP]
        joined = float(np.mean(node[ops] >= 0)) if len(ops) else 0.0
        foreign = note_execution(linked, execution, node, joined)
        if foreign:
            notes, execution, node = notes + foreign, None, None
    notes += note_devices(linked)
    notes += step_notes(linked)
    notes += launch_notes(linked)
    instructions = make_timeline_instructions(linked)
    replayed, overheads = simulate_replay(linked, instructions), measure_overheads(linked)
    reader, made = SignatureReader(linked, execution, node), tuple(find_collectives(linked))
    attribution = None
    if request.platform is not None:
        attribution = _predict_rank(linked, instructions, reader, overheads, request.platform, request)
    steps = tuple(compute_breakdown(linked))
    notes += note_slow_steps(steps)
    notes += note_recording(linked, overheads.cost, steps) if overheads.cost else []
    if made and alone:
        notes += note_missing_ranks([(rank, linked.trace.world_size)])
    return RankReport(
        rank=rank,
        linked=linked,
        execution=execution,
        node=node,
        instructions=instructions,
        steps=steps,
        overheads=overheads,
        replay=replayed,
        path=make_path_report(rank, linked, instructions, request.twice),
        attribution=attribution,
        collectives=made,
        profile=profile_tables(linked, reader, made),
        slowdowns=compute_slowdowns(linked),
        joined=joined,
        notes=(*notes, *replay_notes(linked, replayed)),
    )


def _predict_rank(
    linked: Linked,
    instructions: TimelineInstructions,
    reader: SignatureReader,
    overheads: Overheads,
    platform: Platform,
    request: TraceOptions,
) -> Attribution:
    if not linked.launched:
        raise TraincastError(
            f"'{linked.trace.path}' has no launches of its kernels: nothing can be predicted; record CPU activities too"
        )
    profile = choose_profile(platform, linked, None if request.host == PLATFORM_HOST else request.host)
    if request.host is None and request.host_scale is None:
        return attribute_error(linked, instructions, reader, platform, profile, own_host=True)
    scale = compute_host_scale(overheads, profile) if request.host_scale is None else request.host_scale
    return attribute_error(linked, instructions, reader, platform, profile, scale)


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
    if on is None and (host is not None or host_scale is not None):
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

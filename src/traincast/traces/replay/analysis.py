"""Trace files read, measured, replayed and, on a platform, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.hardware.links import with_links
from traincast.hardware.platform import Platform
from traincast.traces.breakdown import breakdown, over_ranks
from traincast.traces.collectives import collectives
from traincast.traces.events import Kind
from traincast.traces.join import join_execution
from traincast.traces.link import Linked, link
from traincast.traces.matched_collectives import match_collectives
from traincast.traces.nodes import ExecutionTrace
from traincast.traces.overheads.extraction import Overheads, measure_overheads
from traincast.traces.profiler.exchanges import shared_exchange_rows
from traincast.traces.profiler.tables import profile_tables
from traincast.traces.ranks import read_ranks
from traincast.traces.replay.attribution import Attribution, attribute, choose_profile, host_scale
from traincast.traces.replay.notes import device_notes, execution_notes, launch_notes, replay_notes, step_notes
from traincast.traces.replay.path import path_report
from traincast.traces.replay.path_together import ranks_path
from traincast.traces.replay.predicted_together import predict_ranks
from traincast.traces.replay.results import RankReport, TogetherReport, TraceReport
from traincast.traces.replay.steps import rewalk
from traincast.traces.replay.timeline import TimelineInstructions, timeline_instructions
from traincast.traces.replay.together import replay_ranks
from traincast.traces.signatures import SignatureReader
from traincast.traces.slowdowns import slowdowns
from traincast.utils.errors import TraincastError

PLATFORM_HOST = "platform"
"""The host profile of a question that means the platform's own."""


@dataclass(frozen=True, kw_only=True)
class TraceQuestion:
    """What else to find out: the prediction on `platform`, and gains of ops or families in `twice`.

    The host's times are the trace's own, or with `host` those of that profile ("platform": the platform's own), made
    `host_scale` times slower (as the trace's launch calls say if None; without `host` the platform's profile). Steps
    begin at ops or annotations called `step_marker` (see `traces.markers`).
    """

    platform: Platform | None = None
    host: str | None = None
    host_scale: float | None = 1.0
    twice: tuple[str, ...] = ()
    step_marker: str = ""


def analyse_traces(paths: Sequence[str | Path], question: TraceQuestion | None = None) -> TraceReport:
    """Reads trace files or folders of ranks and measures everything in them."""
    question = question or TraceQuestion()
    ranks = tuple(
        _rank(traces.rank, link(traces.timeline, question.step_marker), traces.execution, question)
        for traces in read_ranks(paths)
        if traces.timeline
    )
    if not ranks:
        raise TraincastError("only execution traces were given; a measured step needs a Kineto trace too")
    return TraceReport(ranks=ranks, together=_together(ranks, question) if len(ranks) > 1 else None)


def _together(ranks: Sequence[RankReport], question: TraceQuestion) -> TogetherReport:
    numbers, linked = tuple(report.rank for report in ranks), [report.linked for report in ranks]
    matches = match_collectives(linked, [report.collectives for report in ranks])
    notes = list(matches.notes)
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
        path = ranks_path(numbers, linked, replayed.walked, question.twice)
        attributions = [report.attribution for report in ranks if report.attribution is not None]
        if question.platform is not None:
            platform = with_links(question.platform)
            notes += [platform.assumed] if platform.assumed else []
            if platform.topology is not None:
                prediction = predict_ranks(linked, attributions, replayed, platform.topology)
    return TogetherReport(
        numbers=numbers,
        breakdown=over_ranks([report.steps for report in ranks]),
        exchanges=shared_exchange_rows(matches, numbers),
        replay=replayed,
        path=path,
        prediction=prediction,
        notes=tuple(notes),
    )


def _rank(rank: int, linked: Linked, execution: ExecutionTrace | None, question: TraceQuestion) -> RankReport:
    notes = list(linked.trace.notes)
    joined, node = None, None
    if execution is not None:
        notes += execution.notes
        node = join_execution(linked, execution)
        ops = linked.host[linked.events["kind"][linked.host] == Kind.OP]
        joined = float(np.mean(node[ops] >= 0)) if len(ops) else 0.0
        foreign = execution_notes(linked, execution, node, joined)
        if foreign:
            notes, execution, node = notes + foreign, None, None
    notes += device_notes(linked)
    notes += step_notes(linked)
    notes += launch_notes(linked)
    instructions = timeline_instructions(linked)
    replayed, overheads = rewalk(linked, instructions), measure_overheads(linked)
    reader, made = SignatureReader(linked, execution, node), tuple(collectives(linked))
    attribution = None
    if question.platform is not None:
        attribution = _predicted(linked, instructions, reader, overheads, question.platform, question)
    return RankReport(
        rank=rank,
        linked=linked,
        execution=execution,
        node=node,
        instructions=instructions,
        steps=tuple(breakdown(linked)),
        overheads=overheads,
        replay=replayed,
        path=path_report(rank, linked, instructions, question.twice),
        attribution=attribution,
        collectives=made,
        profile=profile_tables(linked, reader, made),
        slowdowns=slowdowns(linked),
        joined=joined,
        notes=(*notes, *replay_notes(linked, replayed)),
    )


def _predicted(
    linked: Linked,
    instructions: TimelineInstructions,
    reader: SignatureReader,
    overheads: Overheads,
    platform: Platform,
    question: TraceQuestion,
) -> Attribution:
    if not linked.launched:
        raise TraincastError(
            f"'{linked.trace.path}' has no launches of its kernels: nothing can be predicted; record CPU activities too"
        )
    own_host = question.host is None and question.host_scale == 1.0
    profile = choose_profile(platform, linked, None if question.host == PLATFORM_HOST else question.host)
    scale = host_scale(overheads, profile) if question.host_scale is None else question.host_scale
    return attribute(linked, instructions, reader, platform, profile, scale, own_host=own_host)

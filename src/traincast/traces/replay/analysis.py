"""Trace files read, measured, replayed and, on a platform, predicted; what a trace cannot tell, in plain words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from traincast.hardware.platform import Platform, add_default_links, load_platform
from traincast.traces.breakdown import (
    PARTS,
    Intervals,
    StepBreakdown,
    combine_ranks,
    compute_breakdown,
    find_device_steps,
)
from traincast.traces.calls import number_processes
from traincast.traces.collectives import find_collectives, match_collectives
from traincast.traces.counters import note_counters
from traincast.traces.events import Kind
from traincast.traces.execution import ExecutionTrace, compute_shape_mismatch, join_execution
from traincast.traces.formats import RankTraces, read_ranks
from traincast.traces.link import Linked, link_trace
from traincast.traces.overheads.extraction import Overheads, ProfilerCost, measure_overheads
from traincast.traces.profiler.tables import make_shared_communication_rows, profile_tables
from traincast.traces.replay.against import compare_with_prediction, is_saved_prediction, read_prediction
from traincast.traces.replay.attribution import Attribution, attribute_error, choose_profile, compute_host_scale
from traincast.traces.replay.compare import TraceComparison, compare_reports
from traincast.traces.replay.path import find_ranks_path, make_path_report
from traincast.traces.replay.results import RankReport, TogetherReport, TraceReport
from traincast.traces.replay.steps import Replay, simulate_replay
from traincast.traces.replay.timeline import TimelineInstructions, make_timeline_instructions
from traincast.traces.replay.together import predict_ranks, replay_ranks
from traincast.traces.signatures import SignatureReader
from traincast.traces.slowdowns import compute_slowdowns
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError

_OF_ANOTHER_RUN = 0.5  # share of ops found, or of shapes that differ, beyond which two files are not of one run
_LAUNCH_KERNEL = re.compile(r"(?:cuda|hip|cu)\w*Launch\w*Kernel\w*")
_FEW_NODES = 0.01  # share of kernel time: less in graphs is not worth a word
_LOST = 0.05  # share of launches without a kernel that some profilers leave at the end of a trace
_SLOW, _LEAST_STEPS, _MOST_SLOW = 1.25, 3, 3  # times the median; steps of which a median means something; named
_RECORDING = 0.05  # of a step
_WELL = 0.03  # steps of one run differ by about as much among themselves


def step_notes(linked: Linked) -> list[str]:
    """How steps were told where nothing marked them, and which are left out."""
    if linked.unlaunched:
        left_out = f"{linked.unlaunched} steps at the begin have no launch calls in the trace: they are left out"
        return [left_out, *step_notes(replace(linked, unlaunched=0))]
    if linked.period:
        pausing = "host" if linked.launched else "device"
        return [
            f"no marker of steps: they are told by the sequence of kernels, which comes again after {linked.period}, "
            f"and begin where the {pausing} pauses longest; name a marker with `step_marker`"
        ]
    if linked.marker:
        return [f"no ProfilerStep marker: steps begin at '{linked.marker[:80]}'; name another with `step_marker`"]
    if linked.cut >= 0:
        return [f"the profiler stopped when step {linked.cut} had begun but launched nothing: it is left out"]
    if linked.repeats:
        return [
            f"no marker of steps: a sequence of kernels comes again {linked.repeats} times, but in a small part of the "
            "trace, as layers do; the whole trace counts as one step; name a marker with `step_marker`"
        ]
    if find_device_steps(linked):
        return [
            "the host runs ahead of the device: its markers pass at the pace of launches, so steps are taken from the "
            "first kernel of one to the first of the next"
        ]
    if linked.marked:
        return []
    return ["no ProfilerStep marker: the whole trace counts as one step; name another with `step_marker`"]


def note_devices(linked: Linked) -> list[str]:
    """What is odd about the devices of a trace: none, or several."""
    device = linked.device
    if not len(device):
        others = [f"{count} of category '{name}'" for name, count in linked.trace.unread]
        known = f"; events that are not understood: {', '.join(others)}" if others else ""
        return [
            "the trace has no kernels, copies or memsets: a run on the CPU, a device that is not understood, or "
            f"a profiler without device activities. Device time and what-ifs of kernels say nothing{known}"
        ]
    return _note_several_devices(linked) + _note_unread(linked)


def _note_unread(linked: Linked) -> list[str]:
    """Events of categories that are not read, by name."""
    named = [f"{count} of '{name}'" for name, count in linked.trace.unread]
    return [f"events that are not read: {', '.join(named)}"] if named else []


def _note_several_devices(linked: Linked) -> list[str]:
    device = linked.device
    numbers = np.unique(linked.events["device"][device])
    merged = len(np.unique(number_processes(linked.trace, device)))
    if merged > len(numbers):
        return [
            f"kernels of {merged} processes: 'active' means that any of them ran; give every rank of a run a file of "
            "its own"
        ]
    if len(numbers) == 1:
        return []
    whole = max(sum(step.seconds for step in linked.steps), 1e-12)
    inside = device[linked.step[device] >= 0]
    shares = []
    for number in numbers.tolist():
        mine = inside[linked.events["device"][inside] == number]
        busy = Intervals.from_spans(linked.events["start"][mine], linked.end[mine]).total
        shares.append(f"device {number} {1e-9 * busy / whole:.0%}")
    return [f"kernels of {len(numbers)} devices: 'active' means that any of them ran ({', '.join(shares)})"]


def launch_notes(linked: Linked) -> list[str]:
    """What is not known of kernels whose launch is not in the trace."""
    notes = []
    graphs = np.flatnonzero(linked.is_graph_launch)
    empty = int((linked.first_start[graphs] == np.iinfo(np.int64).max).sum())
    if empty:
        notes.append(
            f"{empty} of {len(graphs)} launches of graphs have no kernels in the trace: what ran in them was not "
            "recorded, and the device reads idle while it did"
        )
    notes += _note_lost_kernels(linked) + _note_graphs(linked)
    device, every = linked.device, len(linked.device)
    unlinked = linked.launch[device] < 0
    if not linked.launched:
        what = (
            "no launch of a kernel (no runtime calls with correlations)" if len(linked.host) else "nothing of the host"
        )
        return [
            *notes,
            f"{what} is in the trace: kernels count to the step in which they ran, why the device was idle cannot be "
            "told, and there are no what-ifs, launches or host times; record CPU activities too",
        ]
    notes += [linked.clocks] if linked.clocks else []
    lost = int((linked.follows[device] >= 0).sum())
    before = int(unlinked.sum()) - lost
    if before:
        notes.append(
            f"{before} of {every} kernels were launched before the trace began: they are on their streams from its "
            "first moment, what follows waits for them, and they belong to no step"
        )
    if lost:
        notes.append(
            f"{lost} of {every} kernels have no launch call in the trace: each is taken to follow the one before it on "
            "its stream, and to have been launched when it began"
        )
    return notes


def _note_graphs(linked: Linked) -> list[str]:
    """How much of the kernel time is that of graphs, and of how much of it the ops are known."""
    device = linked.device[linked.launch[linked.device] >= 0]
    nodes = device[linked.is_graph_launch[linked.launch[device]]]
    took = linked.events["duration"]
    share = float(took[nodes].sum()) / max(float(took[linked.device].sum()), 1.0)
    if share < _FEW_NODES:
        return []
    known = float(took[nodes[linked.author[nodes] != linked.launch[nodes]]].sum()) / float(took[nodes].sum())
    if known:
        return [f"{share:.0%} of the kernel time is that of graphs; their captures tell the ops of {known:.0%} of it"]
    return [
        f"{share:.0%} of the kernel time is that of graphs, whose ops are not in the trace; give the trace of their "
        "capture with it"
    ]


def count_lost_kernels(linked: Linked) -> tuple[int, int]:
    """Launches whose kernels are not in the trace, and all launches; none where they are as few as usual."""
    calls = np.flatnonzero(linked.find_runtime_rows(_LAUNCH_KERNEL))  # memsets of nothing leave no trace either
    without = int((linked.first_start[calls] == np.iinfo(np.int64).max).sum()) if len(linked.device) else 0
    return (without, len(calls)) if without > _LOST * len(calls) else (0, len(calls))


def _note_lost_kernels(linked: Linked) -> list[str]:
    """Launches whose kernels are not in the trace: the device did more than it shows."""
    without, calls = count_lost_kernels(linked)
    if not without:
        return []
    return [
        f"{without} of {calls} launches have no kernel in the trace: the profiler lost them or stopped before "
        "they ran. Active time is too short by as much, idle time and its reasons say little; record fewer steps at "
        "a time"
    ]


def note_slow_steps(steps: Sequence[StepBreakdown]) -> list[str]:
    """Steps far longer than the median one, and what of them is longer."""
    if len(steps) < _LEAST_STEPS:
        return []
    usual = sorted(steps, key=lambda step: step.step)[len(steps) // 2]
    slow = sorted((step for step in steps if step.step > _SLOW * usual.step), key=lambda step: -step.step)
    mean = sum(step.step for step in steps) / len(steps)
    if not slow:
        return []
    named = ", ".join(_explain_slow_step(step, usual) for step in slow[:_MOST_SLOW])
    more = f" and {len(slow) - _MOST_SLOW} more" if len(slow) > _MOST_SLOW else ""
    idle = sum(step.idle for step in steps) / sum(step.step for step in steps)
    return [
        f"{len(slow)} of {len(steps)} steps take over {_SLOW} times the median: {named}{more}; the mean is "
        f"{1e3 * mean:.4g} ms, and of all steps together the device is idle {idle:.0%}"
    ]


def _explain_slow_step(step: StepBreakdown, usual: StepBreakdown) -> str:
    """One slow step, by the part that is most longer than in the usual one and what that stands before."""
    part = max(PARTS, key=lambda name: getattr(step, name) - getattr(usual, name))
    longer = getattr(step, part) - getattr(usual, part)
    before = f" {step.describe_evidence(part)}" if part in step.evidence else ""
    return (
        f"step {step.number} {1e3 * step.step:.4g} ms ({1e3 * longer:+.4g} ms of it {part.replace('_', ' ')}{before})"
    )


def note_recording(linked: Linked, cost: ProfilerCost, steps: Sequence[StepBreakdown]) -> list[str]:
    """How much of a step the profiler itself takes, where that is worth a word."""
    seconds, mean = cost.sum_seconds(linked), sum(step.step for step in steps) / len(steps)
    if seconds < _RECORDING * mean:
        return []
    frame = f" and {1e-3 * cost.frame:.1f} us per frame of a stack" if cost.frame else ""
    return [
        f"recording takes about {1e3 * seconds:.3g} ms of the host in a step of {1e3 * mean:.3g} ms "
        f"({1e-3 * cost.op:.1f} us per op, {1e-3 * cost.call:.1f} us per runtime call{frame}): T1 to T5 are without "
        "it, steps and idle time with it"
    ]


def note_missing_ranks(ranks: Sequence[tuple[int, int | None]]) -> list[str]:
    """What ranks of a run were not given, by pairs of rank and size of its world."""
    worlds = {world for _, world in ranks if world}
    if len(worlds) > 1:
        return [f"the files are of worlds of {', '.join(map(str, sorted(worlds)))} ranks: of several runs"]

    given = {rank for rank, _ in ranks}
    missing = sorted(set(range(worlds.pop() if worlds else 0)) - given)
    if not missing:
        return []
    if len(ranks) == 1:
        return [
            f"one rank of {len(missing) + 1}: its collectives include waiting for ranks that were not given, and no "
            "transfer time can be told from them"
        ]
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return [
        f"{len(missing)} ranks of the run are missing ({named}): who is late, what collectives cost and the path over "
        "ranks are told among the others only"
    ]


def note_execution(linked: Linked, execution: ExecutionTrace, node: IntArray, joined: float) -> list[str]:
    """Why the execution trace given seems to be of another run; nothing where it fits."""
    differ = compute_shape_mismatch(linked, execution, node)
    if joined >= _OF_ANOTHER_RUN and differ <= 1 - _OF_ANOTHER_RUN:
        return []
    why = f"{joined:.0%} of the ops are in it" if joined < _OF_ANOTHER_RUN else f"{differ:.0%} of its shapes differ"
    return [f"the execution trace '{execution.path.name}' seems to be of another run ({why}): it is not used"]


def replay_notes(linked: Linked, replayed: Replay) -> list[str]:
    """One line for every step that the simulation misses by more than 3 %: before which kernel most of it arises."""
    notes = []
    for index, step in enumerate(replayed.steps):
        if abs(step.error) <= _WELL:
            continue
        mine = np.flatnonzero(linked.step[replayed.kernel_row] == index)
        text = f"step {step.number} replays {step.error:+.1%} off"
        if len(mine) < 2:
            notes.append(f"{text}: it has no kernels that could tell why")
            continue
        rows = replayed.kernel_row[mine]
        measured = 1e-9 * (linked.events["start"][rows] - replayed.origin)
        lag = replayed.kernel_start[mine] - measured
        jump = np.diff(lag)
        worst = int(np.argmax(np.abs(jump)))
        row = int(rows[worst + 1])
        scope = linked.find_scope_of_kernel(row)
        place = f" of {linked.get_name(scope)}" if scope >= 0 else ""
        notes.append(
            f"{text}; {1e3 * jump[worst]:+.2f} ms of it arise before kernel '{linked.get_name(row)[:60]}'{place}: "
            "the trace does not say what it waited for"
        )
    return notes


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
        path = find_ranks_path(numbers, linked, replayed.simulation, request.twice)
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
    notes += note_devices(linked) + note_counters(linked)
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

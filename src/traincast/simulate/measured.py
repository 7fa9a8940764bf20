"""Everything that measured traces say, put together: steps, overheads, replay, all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.errors import TraincastError
from traincast.host.overheads import Overheads, measure_overheads
from traincast.simulate.replay import Replay, replay
from traincast.traces.breakdown import RanksBreakdown, StepBreakdown, breakdown, over_ranks
from traincast.traces.collectives import Collective, collectives
from traincast.traces.events import Kind
from traincast.traces.link import Linked, join_execution, link
from traincast.traces.nodes import ExecutionTrace
from traincast.traces.ranks import read_ranks


@dataclass(frozen=True, eq=False, kw_only=True)
class RankReport:
    """One rank: its linked timeline and what follows from it. `joined` is the share of ops that were found in the
    execution trace (None without one)."""

    rank: int
    linked: Linked
    steps: tuple[StepBreakdown, ...]
    overheads: Overheads
    replay: Replay
    collectives: tuple[Collective, ...]
    joined: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class TraceReport:
    """All ranks that were given, and the figures over them (None for a single rank)."""

    ranks: tuple[RankReport, ...]
    together: RanksBreakdown | None


def analyse_traces(paths: Sequence[str | Path]) -> TraceReport:
    """Reads trace files or folders of ranks and measures everything in them."""
    ranks = tuple(_rank(entry.rank, link(entry.kineto), entry.execution) for entry in read_ranks(paths) if entry.kineto)
    if not ranks:
        raise TraincastError("only execution traces were given; a measured step needs a Kineto trace too")
    together = over_ranks([report.steps for report in ranks]) if len(ranks) > 1 else None
    return TraceReport(ranks=ranks, together=together)


def _rank(rank: int, linked: Linked, execution: ExecutionTrace | None) -> RankReport:
    notes = list(linked.trace.notes)
    joined = None
    if execution is not None:
        notes += execution.notes
        node = join_execution(linked, execution)
        ops = linked.host[linked.events["kind"][linked.host] == Kind.OP]
        joined = float(np.mean(node[ops] >= 0)) if len(ops) else 0.0
    if not linked.marked:
        notes.append("no ProfilerStep marker: the whole trace counts as one step")
    unlinked = int((linked.launch[linked.device] < 0).sum())
    if unlinked:
        notes.append(f"{unlinked} of {len(linked.device)} kernels were launched before the trace began")
    return RankReport(
        rank=rank,
        linked=linked,
        steps=tuple(breakdown(linked)),
        overheads=measure_overheads(linked),
        replay=replay(linked),
        collectives=tuple(collectives(linked)),
        joined=joined,
        notes=tuple(notes),
    )

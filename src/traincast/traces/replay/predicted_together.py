"""All ranks of a traced run predicted together: predicted kernels, collectives and overheads, waits as they then arise.

The moments at which the ranks began are kept as measured: nothing in a trace predicts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traincast.costs.collectives.calls import share_bytes_evenly
from traincast.costs.collectives.model import load_shipped_collectives
from traincast.costs.kernels.call import Calls, KernelCall
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.hardware.topology import Topology
from traincast.ir.collectives import COLLECTIVES, UNEVEN_FORM
from traincast.traces.link import Linked
from traincast.traces.matched_collectives import Match
from traincast.traces.replay.attribution import Attribution
from traincast.traces.replay.shares import StepShares, compute_gmae
from traincast.traces.replay.steps import Replay
from traincast.traces.replay.together import RankReplay, RanksReplay, compare_ranks, simulate_together
from traincast.utils.arrays import FloatArray


@dataclass(frozen=True, kw_only=True)
class TogetherShares(StepShares):
    """One step of one rank, replayed and predicted with all ranks. Stages: walk, kernels, collectives, overheads.

    `exposed_measured` and `exposed` are the seconds of exposed communication, measured and predicted.
    """

    exposed_measured: float
    exposed: float


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedRanksPrediction:
    """All ranks predicted together. `transfers` are (kind, bytes, measured, predicted seconds) by collective,
    `difference` what predicted less measured is called ("change" from one device to another)."""

    topology: str
    difference: str
    steps: tuple[tuple[TogetherShares, ...], ...]
    transfers: tuple[tuple[str, int, float, float], ...]
    full: tuple[Replay, ...]

    @property
    def gmae(self) -> float:
        """Geometric mean of the absolute relative errors of all steps of all ranks."""
        return compute_gmae([step.error for steps in self.steps for step in steps])

    def to_dict(self, numbers: Sequence[int]) -> dict[str, Any]:
        """In milliseconds and microseconds, as the names say; `numbers` are those of the ranks."""
        return {
            "topology": self.topology,
            "gmae": self.gmae,
            "steps": [
                {
                    "rank": number, "number": s.number, "measured_ms": 1e3 * s.measured, "predicted_ms": 1e3 * s.full,
                    "error": s.error, "shares": s.compute_shares(),
                    "exposed_comm_ms": 1e3 * s.exposed_measured, "predicted_exposed_comm_ms": 1e3 * s.exposed,
                }
                for number, steps in zip(numbers, self.steps, strict=True)
                for s in steps
            ],
            "transfers": [
                {"kind": kind, "message_bytes": size, "measured_us": 1e6 * measured, "predicted_us": 1e6 * predicted}
                for kind, size, measured, predicted in self.transfers
            ],
        }  # fmt: skip


def predict_ranks(
    ranks: Sequence[Linked],
    attributions: Sequence[Attribution],
    replayed: RanksReplay,
    topology: Topology,
) -> TracedRanksPrediction:
    """Simulates all ranks with predicted kernels, then predicted transfers, then pooled overheads too."""
    base = replayed.walked.schedule
    measured, seconds = base.meetings.seconds, _predict_transfers(replayed.matches.collectives, topology)
    kernels = replace(base, timelines=tuple(attribution.predicted for attribution in attributions))
    collectives = kernels.replace_seconds(seconds)
    full = replace(collectives, timelines=tuple(attribution.complete for attribution in attributions))
    simulations = [compare_ranks(ranks, simulate_together(stage)) for stage in (kernels, collectives, full)]
    return TracedRanksPrediction(
        topology=topology.key,
        difference=attributions[0].difference,
        steps=tuple(
            _make_shares(rank, [simulation[i] for simulation in simulations]) for i, rank in enumerate(replayed.ranks)
        ),
        transfers=tuple(
            (match.kind, compute_message_bytes(match, _count_ranks(match)), float(m), float(p))
            for match, m, p in zip(replayed.matches.collectives, measured, seconds, strict=True)
        ),
        full=tuple(replay for replay, _ in simulations[-1]),
    )


def _make_shares(rank: RankReplay, simulations: Sequence[tuple[Replay, list[float]]]) -> tuple[TogetherShares, ...]:
    kernels, collectives, full = (replay.steps for replay, _ in simulations)
    return tuple(
        TogetherShares(
            number=step.number,
            measured=step.measured,
            stages={"walk": step.walked, "kernels": a.walked, "collectives": b.walked, "overheads": c.walked},
            exposed_measured=measured,
            exposed=predicted,
        )
        for step, a, b, c, (measured, _), predicted in zip(
            rank.replay.steps, kernels, collectives, full, rank.exposed, simulations[-1][1], strict=True
        )
    )


def _predict_transfers(matches: Sequence[Match], topology: Topology) -> FloatArray:
    """Predicted seconds of every collective from its last arrival; as measured where the trace has no size."""
    seconds = np.array([match.seconds for match in matches])
    known = [i for i, match in enumerate(matches) if compute_message_bytes(match, _count_ranks(match)) >= 0]
    calls = [_make_call(matches[i], topology) for i in known]
    if calls:
        seconds[known] = load_shipped_collectives().predict(Calls.of(COLLECTIVE, calls), topology).seconds
    return seconds


def _count_ranks(match: Match) -> int:
    return max(match.calls[0].group_size, len(match.members))


def _make_call(match: Match, topology: Topology) -> KernelCall:
    ranks = _count_ranks(match)
    group = match.calls[0].group_ranks
    nodes = len({rank // topology.gpus_per_node for rank in group}) if group else topology.count_nodes(ranks)
    return COLLECTIVE.call(match.kind, "fp32", bytes=compute_message_bytes(match, ranks), ranks=ranks, nodes=nodes)


def compute_message_bytes(match: Match, ranks: int) -> int:
    """nccl-tests' size of a collective of this many ranks: the larger buffer of one, -1 where the trace does not
    say."""
    sent = max(call.message_bytes for call in match.calls)
    received = max(call.output_bytes for call in match.calls)
    if match.kind in COLLECTIVES and COLLECTIVES[match.kind].gathers:
        return received if received >= 0 else sent * ranks if sent >= 0 else -1
    splits = [call.in_splits for call in match.calls]
    if match.kind in UNEVEN_FORM and all(len(sizes) == len(match.members) and sum(sizes) for sizes in splits):
        items = [[call.message_bytes * n / sum(call.in_splits) for n in call.in_splits] for call in match.calls]
        return round(share_bytes_evenly(items))
    return sent

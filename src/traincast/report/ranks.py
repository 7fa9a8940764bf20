"""The ranks of a prediction: who computes, who waits, and who holds the step back."""

from __future__ import annotations

from typing import Any

from traincast.display.text import bar, milliseconds, table
from traincast.prediction.answers import RankAnswer
from traincast.prediction.prediction import Prediction
from traincast.prediction.step_path import seconds_by_place
from traincast.walk.matched_calls import rank_list

_MOST_ROWS = 16


def ranks_json(p: Prediction) -> dict[str, Any]:
    """Every class of ranks, how unevenly they compute, and where the critical path lies; plain data."""
    return {
        "ranks": [_rank_json(answer) for answer in p.ranks],
        "imbalance": p.imbalance,
        "critical_path_ranks": [
            {"rank": rank, "op": op, "ms": 1e3 * seconds} for (rank, op), seconds in seconds_by_place(p.path).items()
        ],
    }


def _rank_json(answer: RankAnswer) -> dict[str, Any]:
    return {
        "ranks": list(answer.ranks),
        "iteration_ms": 1e3 * answer.iteration,
        "device_active_ms": 1e3 * answer.device_active,
        "device_idle_ms": 1e3 * answer.device_idle,
        "compute_ms": 1e3 * answer.compute,
        "host_ms": 1e3 * answer.host,
        "exposed_comm_ms": 1e3 * answer.exposed_comm,
        "waiting_ms": 1e3 * answer.waiting,
        "memory_gb": answer.memory.peak_bytes / 1e9,
        "memory_by_kind_gb": {kind: nbytes / 1e9 for kind, nbytes in answer.memory.by_kind.items()},
    }


def ranks_text(p: Prediction) -> str:
    """A table of the ranks that compute longest, and who holds the others back."""
    busiest = sorted(p.ranks, key=lambda answer: (-answer.compute, answer.ranks))
    shown = busiest[:_MOST_ROWS]
    rows = [
        (
            rank_list(answer.ranks),
            milliseconds(answer.compute),
            milliseconds(answer.exposed_comm),
            milliseconds(answer.waiting),
            f"{answer.memory.peak_bytes / 1e9:.1f}",
            bar(answer.compute / p.iteration),
        )
        for answer in shown
    ]
    lines = [table(("ranks", "compute", "exposed", "waiting", "GB", ""), rows, right=(1, 2, 3, 4))]
    if len(busiest) > len(shown):
        left = sum(len(answer.ranks) for answer in busiest[_MOST_ROWS:])
        lines.append(f"and {left} ranks that compute less")
    if len(p.ranks) > 1:
        (rank, op), seconds = next(iter(seconds_by_place(p.path).items()))
        lines.append(
            f"the busiest rank computes {p.imbalance:.1%} longer than the mean; "
            f"most of the critical path: {op} on rank {rank} ({seconds / p.iteration:.0%} of the step)"
        )
    return "\n".join(lines)

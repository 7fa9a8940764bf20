"""The ranks of a prediction: who computes, who waits, and who holds the step back."""

from __future__ import annotations

from traincast.simulator.collective_calls import format_rank_list
from traincast.simulator.prediction.rank_results import sum_path_by_place
from traincast.simulator.prediction.result import Prediction
from traincast.utils.display.text import format_bar, format_milliseconds, format_table

_MOST_ROWS = 16


def format_ranks(p: Prediction) -> str:
    """A table of the ranks that compute longest, and who holds the others back."""
    busiest = sorted(p.ranks, key=lambda result: (-result.compute, result.ranks))
    shown = busiest[:_MOST_ROWS]
    rows = [
        (
            format_rank_list(result.ranks),
            format_milliseconds(result.compute),
            format_milliseconds(result.exposed_comm),
            format_milliseconds(result.waiting),
            f"{result.memory.peak_bytes / 1e9:.1f}",
            format_bar(result.compute / p.iteration),
        )
        for result in shown
    ]
    lines = [format_table(("ranks", "compute", "exposed", "waiting", "GB", ""), rows, right=(1, 2, 3, 4))]
    if len(busiest) > len(shown):
        left = sum(len(result.ranks) for result in busiest[_MOST_ROWS:])
        lines.append(f"and {left} ranks that compute less")
    if len(p.ranks) > 1:
        (rank, op), seconds = next(iter(sum_path_by_place(p.path).items()))
        lines.append(
            f"the busiest rank computes {p.imbalance:.1%} longer than the mean; "
            f"most of the critical path: {op} on rank {rank} ({seconds / p.iteration:.0%} of the step)"
        )
    return "\n".join(lines)

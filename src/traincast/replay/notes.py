"""Why a step does not replay well, in plain words."""

from __future__ import annotations

import numpy as np

from traincast.replay.steps import Replay
from traincast.traces.link import Linked

_WELL = 0.03  # steps of one run differ by about as much among themselves


def replay_notes(linked: Linked, replayed: Replay) -> list[str]:
    """One line for every step that the walk misses by more than 3 %: before which kernel most of it arises."""
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
        scope = linked.scope_of_kernel(row)
        place = f" of {linked.name(scope)}" if scope >= 0 else ""
        notes.append(
            f"{text}; {1e3 * jump[worst]:+.2f} ms of it arise before kernel '{linked.name(row)[:60]}'{place}: "
            "the trace does not say what it waited for"
        )
    return notes

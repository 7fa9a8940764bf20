"""Events that stand in a file more than once, as tools that merge or resume traces leave them."""

from __future__ import annotations

import numpy as np

from traincast.traces.events import DEVICE_KINDS
from traincast.traces.tables import Table
from traincast.utils.arrays import IndexArray


def remove_duplicates(events: Table) -> tuple[Table, int]:
    """The events without those that equal an earlier one in everything, and how many were left out.

    Where nothing that ran on a device comes twice, nothing else is looked at: a file holds all of a run twice, or
    nothing of it.
    """
    device = np.flatnonzero(np.isin(events["kind"], DEVICE_KINDS))
    looked_at = device if len(device) else np.arange(len(events))
    if not len(_find_duplicates(events, looked_at)):
        return events, 0
    again = _find_duplicates(events, np.arange(len(events)))
    return np.delete(events, again), len(again)


def _find_duplicates(events: Table, rows: IndexArray) -> IndexArray:
    """Those of these rows that equal an earlier one. What took no time and has no number may well come twice."""
    numbered = np.any([events[column][rows] >= 0 for column in ("correlation", "external")], axis=0)
    rows = rows[numbered | (events["duration"][rows] > 0)]
    order = rows[np.lexsort([events[column][rows] for column in ("duration", "name", "track", "start")])]
    first, second = order[:-1], order[1:]
    alike = events["start"][first] == events["start"][second]
    first, second = first[alike], second[alike]
    equal = np.array(events[first] == events[second], dtype=np.bool_)
    return np.sort(second[equal])

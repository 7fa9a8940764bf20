"""What disturbed a run of microbenchmarks: neighbours on the processor, a clock that moved, samples that say little."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traincast.calibration.bench.timing import BUSY_NEIGHBOURS, DRIFTED, compute_drift
from traincast.costs.cpu.collectives import is_collective
from traincast.costs.cpu.samples import CALM, Sample, select_calm_samples

_FEWEST = 8  # samples that a run must have for anything to be said of it
_SPREAD = 0.25  # of repetitions, beyond which a sample is not used


def note_disturbances(samples: Sequence[Sample], clocks_mhz: tuple[float, float]) -> list[str]:
    """What to say of the samples of one run, in their order; `clocks_mhz` are the device's before and after it."""
    notes = []
    before, after = clocks_mhz
    if before > 0 and after > 0 and max(before, after) > DRIFTED * min(before, after):
        notes.append(f"the clock was {before:.0f} MHz before and {after:.0f} after: lock it, or let the device cool")
    single = [sample for sample in samples if not is_collective(sample.signature) and not sample.plan]
    if len(single) < _FEWEST:
        return notes
    waited = float(np.median([sample.reference_wall / max(sample.reference_busy, 1e-12) for sample in single]))
    if waited > BUSY_NEIGHBOURS:
        notes.append(
            f"other programs had the processor for {1 - 1 / waited:.0%} of the time; end them, then measure anew"
        )
    drift = compute_drift(np.array([sample.reference_busy for sample in single]))
    if drift > DRIFTED:
        notes.append(
            f"the reference drifted by {drift - 1:.0%} (throttling or neighbours); samples have it divided out"
        )
    slow = len(single) - len(select_calm_samples(single))
    if slow:
        notes.append(
            f"{slow} of {len(single)} samples were taken while the reference was {CALM - 1:.0%} or more above that of "
            "the calm machine (neighbours) and will not be used"
        )
    disturbed = sum(sample.spread > _SPREAD for sample in single)
    if disturbed:
        notes.append(f"{disturbed} of {len(single)} samples spread by more than {_SPREAD:.0%} and will not be used")
    return notes

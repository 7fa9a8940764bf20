"""Recurrent layers: the part of a layer that waits for its own last time step."""

from __future__ import annotations

from traincast.costs.kernels.call import Family
from traincast.costs.kernels.record import FamilyRecord

RECURRENT = Family(
    "recurrent",
    # all time steps of one layer, forward or back through time, without the products over all steps at once
    ("forward", "backward"),
    # `gates` rows of `hidden` each and `outputs` columns in the recurrent matrix, for each of `directions`
    ("steps", "batch", "hidden", "outputs", "gates", "directions"),
)
RECORD = FamilyRecord(
    family=RECURRENT,
    package=__name__,
    roofline="roofline:recurrent_seconds",
    # nothing was measured: cuDNN keeps small matrices in registers for all steps (persistent) or not, and lets layers
    # overlap or not; between the two lies a factor of two to three
    roofline_sigma=0.5,
)

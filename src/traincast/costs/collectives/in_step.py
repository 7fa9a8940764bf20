"""Collectives among ranks that all run one program, as they run in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from traincast.costs.collectives.calls import COLLECTIVE
from traincast.costs.collectives.model import load_shipped_collectives
from traincast.costs.in_step import SHIPPED, InStep
from traincast.costs.kernels.call import Calls, Estimate, KernelCall
from traincast.hardware.topology import Topology
from traincast.ir.variants import EXPOSED


def price_uniform(calls: Sequence[KernelCall], topology: Topology, numbers: InStep = SHIPPED) -> Estimate:
    """Device time of these collectives: that of the links, and where kernels wait for it the time until all ranks have
    arrived, since ranks that do the same are never quite at the same place."""
    alone = load_shipped_collectives().predict(Calls.of(COLLECTIVE, calls), topology)
    stalls = np.array([EXPOSED in call.variant.split() for call in calls], dtype=np.bool_)
    return replace(alone, seconds=alone.seconds + 1e-6 * numbers.stall_us * stalls)

"""Times from first principles for every kernel family: what is used where no fitted model is.

Time is a start plus the longer of arithmetic and memory.
"""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import Calls, Estimate
from traincast.costs.kernels.families import BY_NAME
from traincast.hardware.device import Device

_START_SECONDS = {"nvidia": 2e-6, "amd": 5e-6}  # nvidia: the shortest kernels of the V100 traces; amd: assumed


class Roofline:
    """An estimate for any call of any family on any device."""

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call, never below the start of a kernel; nothing counts as in domain."""
        start = _START_SECONDS.get(device.vendor, 2e-6)
        record = BY_NAME[calls.family.name]
        seconds = np.maximum(record.roofline_seconds()(calls, device, start), 0.5 * start)
        sigma = np.full(len(calls), record.roofline_sigma)
        return Estimate(seconds, sigma, np.zeros(len(calls), dtype=np.bool_))

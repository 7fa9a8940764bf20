"""The parameters of the memory system that all streaming kernels share, and what holds for a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.model import State
from traincast.costs.kernels.streaming.memory import MemorySystem
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class DeviceView:
    """The parameters that hold for one device. `known` when it, or a card with its chip, was measured."""

    memory: MemorySystem
    pow_cycles: float
    sigma: float
    known: bool


@dataclass(frozen=True, slots=True)
class StreamParameters:
    """Fitted state: per device read share, write share, cycles of `pow`, log-sigma; and what all devices share.

    `pooled` holds (read share, write share) for GDDR and for stacked memory, then the cycles of `pow` for NVIDIA
    and AMD; `unseen_sigma` is the spread of a device known from its sheet only.
    """

    chips: Chips
    devices: FloatArray
    pooled: FloatArray
    l2: FloatArray  # bytes per clock and SM; share of the L2
    unseen_sigma: float
    most_bytes: float

    def view(self, device: Device) -> DeviceView:
        """What holds for this device."""
        row = self.chips.find(device)
        stacked = int(device.made_for_computing)
        read, write = self.pooled[2 * stacked : 2 * stacked + 2]
        cycles, sigma = self.pooled[4 + (device.vendor == "amd")], self.unseen_sigma
        if row >= 0:
            read, write, cycles, sigma = self.devices[row]
        memory = MemorySystem.of(device, float(read), float(write), float(self.l2[0]), float(self.l2[1]))
        return DeviceView(memory, float(cycles), float(sigma), row >= 0)

    def state(self) -> State:
        """As arrays."""
        return {
            **self.chips.state(),
            "devices": self.devices,
            "pooled": self.pooled,
            "l2": self.l2,
            "scalars": np.array([self.unseen_sigma, self.most_bytes]),
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> StreamParameters:
        """Read back from arrays."""
        return StreamParameters(
            Chips.from_state(state),
            np.asarray(state["devices"], dtype=np.float64),
            np.asarray(state["pooled"], dtype=np.float64),
            np.asarray(state["l2"], dtype=np.float64),
            *(float(value) for value in state["scalars"]),
        )


def with_spread(parameters: StreamParameters, sigma: FloatArray, unseen_sigma: float) -> StreamParameters:
    """The parameters with these spreads, one per fitted device and one for devices never measured."""
    table = parameters.devices.copy()
    table[:, 3] = sigma
    return StreamParameters(
        parameters.chips, table, parameters.pooled, parameters.l2, unseen_sigma, parameters.most_bytes
    )

"""Which fitted device stands for the one asked about: itself, another card with the same chip, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.model import State
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class Chips:
    """The devices a model was fitted on, in the order of its per-device parameters."""

    keys: tuple[str, ...]
    archs: tuple[str, ...]
    numbers: FloatArray  # SMs, cores per SM, DRAM bytes per second

    @staticmethod
    def of(devices: Sequence[Device]) -> Chips:
        """The table of these devices."""
        return Chips(
            tuple(device.key for device in devices),
            tuple(device.arch for device in devices),
            np.array([[d.num_sms, d.cores_per_sm, d.dram_bandwidth] for d in devices], dtype=np.float64).reshape(-1, 3),
        )

    def find(self, device: Device) -> int:
        """Row of the device, or of the card with its chip and the nearest DRAM rate; -1 when there is none.

        A name alone says nothing: a user's file may be called like another chip.
        """
        same = [
            row
            for row, arch in enumerate(self.archs)
            if arch == device.arch
            and self.numbers[row, 0] == device.num_sms
            and self.numbers[row, 1] == device.cores_per_sm
        ]
        if not same:
            return -1
        named = [row for row in same if self.keys[row] == device.key]
        if named:
            return named[0]
        distance = np.abs(np.log(self.numbers[same, 2] / device.dram_bandwidth))
        return same[int(np.argmin(distance))]

    def state(self) -> State:
        """The table as arrays."""
        return {
            "chip_key": np.array(self.keys, dtype=np.str_),
            "chip_arch": np.array(self.archs, dtype=np.str_),
            "chip_numbers": self.numbers,
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> Chips:
        """The table read back."""
        return Chips(
            tuple(str(key) for key in state["chip_key"]),
            tuple(str(arch) for arch in state["chip_arch"]),
            np.asarray(state["chip_numbers"], dtype=np.float64),
        )

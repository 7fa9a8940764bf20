"""Measured kernels of one family, as fits and evaluations see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import Calls, Estimate
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IndexArray, IntArray
from traincast_evaluation.measured_tables import keep_present_values


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measured device times: `seconds[i]` of call i on `devices[device[i]]`, known to about `noise_seconds`."""

    calls: Calls
    devices: Sequence[Device]
    device: npt.NDArray[np.int64]
    seconds: FloatArray
    noise_seconds: FloatArray | float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """Measured kernels: `seconds[i]` is what the stopwatch showed for call i on `devices[device[i]]`.

    No fit may see those `held_out`. A family adds columns of its own, and what its stopwatch adds to a kernel.
    """

    devices: tuple[Device, ...]
    device: IntArray
    calls: Calls
    seconds: FloatArray
    held_out: BoolArray

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, chosen: BoolArray | IndexArray) -> Self:
        """A selection, with every device kept in the list."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        picked: dict[str, Any] = {
            name: column[chosen] for name, column in columns.items() if isinstance(column, np.ndarray)
        }
        return replace(self, calls=self.calls.take(chosen), **picked)

    @property
    def telling(self) -> BoolArray:
        """Samples that say something about their kernel: all, unless the host hides some."""
        return np.ones(len(self), dtype=np.bool_)

    @property
    def device_seconds(self) -> FloatArray:
        """Kernel times: what was shown, without the host's part."""
        return self.seconds

    @property
    def noise_seconds(self) -> FloatArray | float:
        """What `device_seconds` are known to."""
        return 0.0

    def shown(self, seconds: FloatArray, sigma: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What the stopwatch would show for kernels of these seconds, and its log-sigma."""
        return seconds, sigma

    def names(self) -> list[str]:
        """Every sample in a few words, for tables of errors."""
        return ["x".join(f"{value:.0f}" for value in values) for values in self.calls.values]

    def same_chip(self, index: int) -> BoolArray:
        """Samples of cards with the chip of device `index`."""
        chips = [(device.arch, device.num_sms) for device in self.devices]
        return np.isin(self.device, [i for i, chip in enumerate(chips) if chip == chips[index]])

    def measurements(self) -> Measurements:
        """As kernel times, with the devices that are left."""
        devices, device = keep_present_values(self.devices, self.device)
        return Measurements(self.calls, devices, device, self.device_seconds, self.noise_seconds)

    def kernel_seconds(self, predict: Callable[[Calls, Device], Estimate]) -> tuple[FloatArray, FloatArray]:
        """Predicted seconds and log-sigma of the kernels alone."""
        seconds, sigma = np.zeros(len(self)), np.zeros(len(self))
        for index in np.unique(self.device):
            mine = self.device == index
            estimate = predict(self.calls.take(mine), self.devices[index])
            seconds[mine], sigma[mine] = estimate.seconds, estimate.sigma
        return seconds, sigma

    def predicted(self, predict: Callable[[Calls, Device], Estimate]) -> tuple[FloatArray, FloatArray]:
        """What the stopwatch should have shown, in seconds, and its log-sigma."""
        return self.shown(*self.kernel_seconds(predict))

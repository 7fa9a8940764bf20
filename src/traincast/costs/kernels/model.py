"""The contract of a kernel model, the chips it was fitted on, and how its state is read: plain numbers, never code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.call import Calls, Estimate, Family
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

State = dict[str, npt.NDArray[Any]]
_SAME_CHIP = 0.025  # of the number of SMs (log): one more of T4's 40; GB200 has 152 where B200 has 148, and differs


class KernelModel(ABC):
    """Estimates the device time of one kernel family from a fitted state. Fitted attributes end in an underscore.

    How a state is fitted to measurements is no part of it: see the distribution `traincast-evaluation`.
    """

    family: ClassVar[Family]

    @abstractmethod
    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call, with spread and in-domain mask; vectorised."""

    @abstractmethod
    def state(self) -> State:
        """The fitted state as named arrays of numbers."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with this fitted state."""


class Parameters(Protocol):
    """What a model has learned, as a record that can be kept."""

    def state(self) -> State:
        """As named arrays of numbers."""

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Read back from arrays."""


Learned = TypeVar("Learned", bound=Parameters)


class ParametricModel(KernelModel, Generic[Learned]):
    """A model whose fitted state is one record of `parameters`, kept as `parameters_`."""

    parameters: ClassVar[type[Parameters]]

    def __init__(self, parameters: Learned) -> None:
        self.parameters_ = parameters

    def state(self) -> State:
        """The fitted parameters."""
        return self.parameters_.state()

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with these parameters."""
        return cls(cls.parameters.from_state(state))


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

        A name alone says nothing: a user's file may be called like another chip. A few SMs more or less are the same
        chip.
        """
        sms = np.abs(np.log(self.numbers[:, 0] / device.num_sms))
        same = [
            row
            for row, arch in enumerate(self.archs)
            if arch == device.arch and sms[row] < _SAME_CHIP and self.numbers[row, 1] == device.cores_per_sm
        ]
        if not same:
            return -1
        nearest = [row for row in same if sms[row] == sms[same].min()]
        named = [row for row in nearest if self.keys[row] == device.key]
        if named:
            return named[0]
        distance = np.abs(np.log(self.numbers[nearest, 2] / device.dram_bandwidth))
        return nearest[int(np.argmin(distance))]

    def restore_sms(self, device: Device, row: int) -> Device:
        """The device with as many SMs, and their rates, as the chip of this row (-1: as it is)."""
        if row < 0 or self.numbers[row, 0] == device.num_sms:
            return device
        sms = int(self.numbers[row, 0])
        peaks = {name: rate * sms / device.num_sms for name, rate in device.peak_flops.items()}
        return replace(device, num_sms=sms, peak_flops=peaks)

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


class ArrayRecord:
    """A dataclass of chips, arrays and numbers, kept as arrays of the same names."""

    __slots__ = ()

    def state(self) -> State:
        """As arrays."""
        arrays: State = {}
        for part in fields(cast("Any", self)):
            value = getattr(self, part.name)
            arrays |= value.state() if isinstance(value, Chips) else {part.name: np.atleast_1d(value)}
        return arrays

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Read back from arrays."""
        read: dict[str, Callable[[str], Any]] = {
            "Chips": lambda name: Chips.from_state(state),
            "FloatArray": lambda name: np.asarray(state[name], dtype=np.float64),
            "float": lambda name: float(state[name][0]),
        }
        return cls(**{part.name: read[str(part.type)](part.name) for part in fields(cast("Any", cls))})


def load_state(path: Path) -> State:
    """Reads the numbers back from `path`.npz."""
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}

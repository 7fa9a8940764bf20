"""The contract of a kernel model, and how its fitted state is read: plain numbers, never code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.call import Calls, Estimate, Family
from traincast.hardware.device import Device

State = dict[str, npt.NDArray[Any]]


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


def load_state(path: Path) -> State:
    """Reads the numbers back from `path`.npz."""
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}

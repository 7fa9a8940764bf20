"""The contract of a kernel model, and how its fitted state is kept: plain numbers, never code."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.call import Calls, Estimate, Family
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

State = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measured device times: `seconds[i]` of call i on `devices[device[i]]`, known to about `noise_seconds`."""

    calls: Calls
    devices: Sequence[Device]
    device: npt.NDArray[np.int64]
    seconds: FloatArray
    noise_seconds: FloatArray | float = 0.0


class KernelModel(ABC):
    """An estimator of device time for one kernel family. Fitted attributes end in an underscore."""

    family: ClassVar[Family]

    @abstractmethod
    def fit(self, data: Measurements) -> Self:
        """Learns from measurements and returns itself. Deterministic."""

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

    def __init__(self, parameters: Learned | None = None) -> None:
        self.parameters_ = parameters

    @property
    def fitted(self) -> Learned:
        """The parameters of a model that has been fitted."""
        assert self.parameters_ is not None, "the model has not been fitted"
        return self.parameters_

    def state(self) -> State:
        """The fitted parameters."""
        return self.fitted.state()

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with these parameters."""
        return cls(cls.parameters.from_state(state))


def save_state(state: State, provenance: Mapping[str, Any], path: Path) -> None:
    """Writes `path`.npz (numbers) and `path`.json (sources, licence, rows, errors); the same bytes every time.

    The date comes later, from what is shipped: `traincast fit` gives it.
    """
    import zipfile

    with zipfile.ZipFile(path.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(state):
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(info, "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(state[name]), allow_pickle=False)
    text = json.dumps(provenance, indent=1, sort_keys=True)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


def load_state(path: Path) -> State:
    """Reads the numbers back from `path`.npz."""
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}

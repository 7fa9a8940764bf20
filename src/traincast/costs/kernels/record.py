"""What the package knows about a kernel family, in one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from traincast.costs.kernels.call import Calls, Family
from traincast.costs.kernels.model import KernelModel
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray
from traincast.utils.metrics import ErrorRow

Progress: TypeAlias = Callable[[str, float], None]
"""Hears what is being done, and the share of the whole (0 to 1) that is done."""


def silent(what: str, share: float) -> None:
    """A progress that nobody follows."""


RooflineSeconds: TypeAlias = Callable[[Calls, Device, float], FloatArray]
"""Seconds of calls on a device where a kernel with nothing to do takes the seconds given last."""
Training: TypeAlias = Callable[[Path, Path, Progress], dict[str, Any]]
"""Fits from a folder of measurements, writes a profile into another folder, returns the profile's provenance."""
Evaluation: TypeAlias = Callable[[Path], list[ErrorRow]]
"""Error rows against the measurements of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRecord:
    """A kernel family and where its parts are, each imported when it is first needed.

    Parts are named within `package`: `lowering` are modules that register ops, all others are `module:name`. A family
    without `model` is costed by its `roofline`, one without that by another room (collectives). `profile` names the
    file of its fitted state; of families that share one, one has the `training` that writes it.
    """

    family: Family
    package: str
    lowering: tuple[str, ...] = ("lowering",)
    roofline: str = ""
    roofline_sigma: float = 0.25  # log-sigma; assumed where a family has no figure of its own
    model: str = ""
    profile: str = ""
    training: str = ""
    evaluations: tuple[str, ...] = ()

    def lowering_modules(self) -> tuple[str, ...]:
        """Dotted names of the modules that register this family's ops."""
        return tuple(f"{self.package}.{module}" for module in self.lowering)

    def roofline_seconds(self) -> RooflineSeconds:
        """The function that says what first principles allow."""
        function: RooflineSeconds = self._part(self.roofline)
        return function

    def model_class(self) -> type[KernelModel]:
        """The estimator of the family."""
        cls: type[KernelModel] = self._part(self.model)
        return cls

    def train(self) -> Training:
        """The function that fits the profile."""
        function: Training = self._part(self.training)
        return function

    def evaluate(self) -> tuple[Evaluation, ...]:
        """The suites that compare the family with measurements."""
        return tuple(self._part(name) for name in self.evaluations)

    def _part(self, place: str) -> Any:
        module, name = place.split(":")
        return getattr(import_module(f"{self.package}.{module}"), name)

"""What the package knows about a kernel family, in one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

from traincast.costs.kernels.call import Calls, Family
from traincast.costs.kernels.model import KernelModel
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

RooflineSeconds: TypeAlias = Callable[[Calls, Device, float], FloatArray]
"""Seconds of calls on a device where a kernel with nothing to do takes the seconds given last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRecord:
    """A kernel family and where its parts are, each imported when it is first needed.

    Parts are named within `package`: `lowering` are modules that register ops, all others are `module:name`; an empty
    module is `package` itself. A family without `model` is costed by its `roofline`, one without that elsewhere
    (collectives). `profile` names the file of its fitted state, which families may share.
    """

    family: Family
    package: str
    lowering: tuple[str, ...] = ("lowering",)
    roofline: str = ""
    roofline_sigma: float = 0.25  # log-sigma; assumed where a family has no figure of its own
    model: str = ""
    profile: str = ""

    def lowering_modules(self) -> tuple[str, ...]:
        """Dotted names of the modules that register this family's ops."""
        return tuple(self._module(module) for module in self.lowering)

    def roofline_seconds(self) -> RooflineSeconds:
        """The function that says what first principles allow."""
        function: RooflineSeconds = self._part(self.roofline)
        return function

    def model_class(self) -> type[KernelModel]:
        """The estimator of the family."""
        cls: type[KernelModel] = self._part(self.model)
        return cls

    def _module(self, name: str) -> str:
        return f"{self.package}.{name}" if name else self.package

    def _part(self, place: str) -> Any:
        module, name = place.split(":")
        return getattr(import_module(self._module(module)), name)

"""What lowering is written in: calls and synchronisations, what decides between kernels, and the table of ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from traincast.costs.kernels.call import KernelCall
from traincast.hardware.device import AMPERE, Device
from traincast.ir.formula import OpCost
from traincast.ir.ops import Signature
from traincast.ir.workload import SEARCHED, Workload
from traincast.utils.errors import TraincastError


class ControlKind(IntEnum):
    """What the host or a stream does besides launching a kernel."""

    DEVICE_SYNCHRONIZE = 1
    STREAM_SYNCHRONIZE = 2
    EVENT_RECORD = 3
    STREAM_WAIT_EVENT = 4
    EVENT_SYNCHRONIZE = 5


@dataclass(frozen=True, slots=True)
class Control:
    """A synchronisation. `stream` is -1 for the stream of the op itself."""

    kind: ControlKind
    event: int = -1
    stream: int = -1


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """What decides between kernels besides the op: the PyTorch version, whether GEMMs and convolutions in fp32 may
    use TF32, whether cuDNN has `searched` for its fastest convolutions, how many GPUs a node holds (global rank r sits
    on node r // gpus_per_node; 0 means that one node holds them all), the compute `capability` of an NVIDIA device (0:
    another vendor's), and costs that the ops' authors give."""

    framework_version: tuple[int, int] = (2, 13)
    tf32: bool = False
    tf32_convolutions: bool = False
    searched: bool = False
    gpus_per_node: int = 0
    capability: float = AMPERE
    costs: tuple[OpCost, ...] = ()

    def cost_of(self, op: str) -> OpCost | None:
        """The cost that is given of an op."""
        return next((cost for cost in self.costs if cost.op == op), None)


def make_lowering_context(workload: Workload, device: Device | None = None, *, tf32: bool = False) -> LoweringContext:
    """The context in which this workload's ops become kernels on this device (None: a GPU of compute capability 8.0
    without units for TF32). `tf32` allows it for all GEMMs and convolutions, else those run in it that the workload
    itself lets."""
    major, _, minor = workload.framework_version.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise TraincastError(
            f"workload '{workload.name}' has no usable PyTorch version: {workload.framework_version!r}"
        )
    units = device is not None and "tf32" in device.peak_flops
    return LoweringContext(
        capability=AMPERE if device is None else device.compute_capability,
        framework_version=(int(major), int(minor)),
        tf32=units and (tf32 or "products" in workload.tf32),
        tf32_convolutions=units and (tf32 or "convolutions" in workload.tf32),
        searched=SEARCHED in workload.meta,
        costs=workload.costs,
    )


Item: TypeAlias = KernelCall | Control
Lowering: TypeAlias = Callable[[Signature, LoweringContext], tuple[Item, ...]]

LOWERINGS: dict[str, Lowering] = {}
"""By op name; filled when the families' modules are imported, see `kernels.lower`."""


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Registers a function as the lowering of the ops of these names."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            if name in LOWERINGS:
                raise AssertionError(f"two lowerings for {name}")
            LOWERINGS[name] = function
        return function

    return register

"""The registry from op names to kernel calls. Each family module registers the ops it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import import_module
from typing import TypeAlias

from traincast.kernels.call import KernelCall
from traincast.workload.ops import Signature


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
    """What decides between kernels besides the op: the PyTorch version, whether fp32 may use TF32, and how many GPUs
    a node holds (global rank r sits on node r // gpus_per_node; 0 means that one node holds them all)."""

    framework_version: tuple[int, int] = (2, 13)
    tf32: bool = False
    gpus_per_node: int = 0


Item: TypeAlias = KernelCall | Control
Lowering: TypeAlias = Callable[[Signature, LoweringContext], tuple[Item, ...]]

_LOWERINGS: dict[str, Lowering] = {}
_MODULES = ("views", "gemm", "conv", "elementwise", "loss", "index", "reduction", "rows", "pool", "attention", "copy",
            "embedding", "embedding_tbe", "embedding_inputs", "embedding_interaction", "embedding_tensorflow",
            "optimizer", "control", "sharding", "collective", "fused")  # fmt: skip


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Registers a function as the lowering of the ops of these names."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            if name in _LOWERINGS:
                raise AssertionError(f"two lowerings for {name}")
            _LOWERINGS[name] = function
        return function

    return register


@cache
def registered() -> frozenset[str]:
    """Names of all ops with a lowering."""
    for module in _MODULES:
        import_module(f"traincast.kernels.lowering.{module}")
    return frozenset(_LOWERINGS)


def lower(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The kernel calls and synchronisations of an op; an op nobody knows gets one call marked `estimated`.

    An op whose tensors all live on the host launches nothing, nor does one of PyTorch's that we know and whose results
    are all empty (an expert without tokens). A collective launches even so: the other ranks wait for it.
    """
    specs = (*signature.inputs, *signature.outputs)
    if specs and all(spec.device.startswith("cpu") for spec in specs):
        return ()
    if signature.name in registered():
        empty = signature.outputs and not any(spec.numel for spec in signature.outputs)
        if empty and signature.name.startswith("aten::"):
            return ()
        return _LOWERINGS[signature.name](signature, context)
    from traincast.kernels.lowering.fallback import estimate_unknown

    return estimate_unknown(signature)

"""From an op to its kernel launches, by the lowering that its family registered."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from traincast.kernels.families import RECORDS
from traincast.kernels.lowering.fallback import estimate_unknown
from traincast.kernels.registry import LOWERINGS, Item, LoweringContext
from traincast.workload.ops import Signature

_WITHOUT_FAMILY = ("traincast.kernels.lowering.views", "traincast.kernels.lowering.control")


@cache
def registered() -> frozenset[str]:
    """Names of all ops with a lowering."""
    for module in (*_WITHOUT_FAMILY, *(module for record in RECORDS for module in record.lowering_modules())):
        import_module(module)
    return frozenset(LOWERINGS)


def lower(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The kernel calls and synchronisations of an op; an op nobody knows gets one call marked `estimated`.

    An op whose tensors all live on the host launches nothing, nor does one of PyTorch's that we know and whose results
    are all empty (an expert without tokens). A collective launches even so: the other ranks wait for it.
    """
    specs = (*signature.inputs, *signature.outputs)
    if specs and all(spec.device.startswith("cpu") for spec in specs):
        return ()
    if signature.name not in registered():
        return estimate_unknown(signature)
    empty = signature.outputs and not any(spec.numel for spec in signature.outputs)
    if empty and signature.name.startswith("aten::"):
        return ()
    return LOWERINGS[signature.name](signature, context)

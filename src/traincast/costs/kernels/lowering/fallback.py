"""Ops nobody has modelled: costed by the larger of their bytes and their flops, and marked so."""

from __future__ import annotations

from traincast.costs.kernels.operands import compute_of, on_device, total_bytes
from traincast.costs.kernels.registry import Item
from traincast.costs.kernels.unmodelled import OPAQUE, UNMODELLED
from traincast.costs.kernels.unmodelled.arithmetic import arithmetic, contraction
from traincast.ir.ops import Signature

_KNOWN = ("aten::", "prims::")


def estimate_unknown(signature: Signature) -> tuple[Item, ...]:
    """One kernel that reads every input and writes every output; nothing for an op without device tensors.

    Of PyTorch's own ops it is known which contract. An op of anybody else may compute anything: its flops are guessed
    from its shapes, and its family says so with a wider interval.
    """
    inputs = [spec for spec in signature.inputs if on_device(spec)]
    outputs = [spec for spec in signature.outputs if on_device(spec)]
    if not inputs and not outputs:
        return ()
    specs = (*inputs, *outputs)
    if signature.name.startswith(_KNOWN):
        family, (kind, flops) = UNMODELLED, arithmetic(signature)
    else:
        flops = contraction(signature)
        family, kind = OPAQUE, "product" if flops else "stream"
    call = family.call(
        kind,
        compute_of(outputs[0] if outputs else inputs[0]),
        elements=max(1, max(spec.numel for spec in specs)),
        bytes_read=total_bytes(inputs),
        bytes_written=total_bytes(outputs),
        tensors=len(specs),
        flops=flops,
        estimated=True,
    )
    return (call,)

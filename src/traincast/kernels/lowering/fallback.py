"""Ops nobody has modelled: costed by the bytes they must move, and marked so."""

from __future__ import annotations

from traincast.kernels.operands import compute_of, on_device, total_bytes
from traincast.kernels.registry import Item
from traincast.kernels.streaming import ELEMENTWISE
from traincast.workload.ops import Signature


def estimate_unknown(signature: Signature) -> tuple[Item, ...]:
    """One kernel that reads every input and writes every output; nothing for an op without device tensors."""
    inputs = [spec for spec in signature.inputs if on_device(spec)]
    outputs = [spec for spec in signature.outputs if on_device(spec)]
    if not inputs and not outputs:
        return ()
    specs = (*inputs, *outputs)
    call = ELEMENTWISE.call(
        "copy",
        compute_of(outputs[0] if outputs else inputs[0]),
        elements=max(1, max(spec.numel for spec in specs)),
        bytes_read=total_bytes(inputs),
        bytes_written=total_bytes(outputs),
        tensors=len(specs),
        estimated=True,
    )
    return (call,)

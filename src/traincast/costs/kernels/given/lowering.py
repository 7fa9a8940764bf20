"""One kernel for an op whose cost is given."""

from __future__ import annotations

from traincast.costs.kernels.given import GIVEN
from traincast.costs.kernels.operands import compute_of, on_device
from traincast.costs.kernels.registry import Item
from traincast.ir.given import OpCost
from traincast.ir.ops import Signature


def lower_given(signature: Signature, cost: OpCost) -> tuple[Item, ...]:
    """Its kernel, which computes in the type of its first result."""
    specs = [spec for spec in (*signature.outputs, *signature.inputs) if on_device(spec)]
    seconds, flops, nbytes = cost.of(signature)
    compute = compute_of(specs[0]) if specs else "fp32"
    return (GIVEN.call("given", compute, seconds=seconds, flops=flops, bytes=nbytes),)

"""Ops whose cost their author gives."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.contract import Calls, Family, FamilyRecord, estimate_memory_seconds, get_flop_rate
from traincast.costs.kernels.registry import Item, get_compute_type, is_on_device
from traincast.hardware.device import Device
from traincast.ir.formula import OpCost
from traincast.ir.ops import Signature
from traincast.utils.arrays import FloatArray

GIVEN = Family("given", ("given",), ("seconds", "flops", "bytes"))
RECORDS = (
    FamilyRecord(
        family=GIVEN, package=__name__, lowering=(), roofline=":given_seconds",
        roofline_sigma=0.2,  # assumed: an author knows an op better than its shapes tell
    ),
)  # fmt: skip


def lower_given(signature: Signature, cost: OpCost) -> tuple[Item, ...]:
    """Its kernel, which computes in the type of its first result."""
    specs = [spec for spec in (*signature.outputs, *signature.inputs) if is_on_device(spec)]
    seconds, flops, nbytes = cost.of(signature)
    compute = get_compute_type(specs[0]) if specs else "fp32"
    return (GIVEN.call("given", compute, seconds=seconds, flops=flops, bytes=nbytes),)


def given_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """What is given, or the longer of flops at the sustained rate and bytes at the bandwidth; a start on top of the
    latter two."""
    work = np.maximum(calls["flops"] / get_flop_rate(calls, device), estimate_memory_seconds(calls["bytes"], device))
    return np.asarray(np.maximum(calls["seconds"], np.where(work > 0, start + work, 0.0)))

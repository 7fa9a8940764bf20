"""Synchronisation: control ops of the `cuda::` namespace, and ops that hand a value to the host."""

from __future__ import annotations

from traincast.costs.kernels.operands import on_device, whole
from traincast.costs.kernels.registry import Control, ControlKind, Item, LoweringContext, lowers
from traincast.costs.kernels.streaming.launches import STREAM_SYNCHRONIZE, elementwise, memcpy, reduction
from traincast.ir.ops import Signature
from traincast.utils.errors import TraincastError

_MOST_NUMBERS = 1 << 20  # of events and streams; the walk keeps a clock for each
_KINDS = {
    "cuda::device_synchronize": ControlKind.DEVICE_SYNCHRONIZE,
    "cuda::stream_synchronize": ControlKind.STREAM_SYNCHRONIZE,
    "cuda::event_record": ControlKind.EVENT_RECORD,
    "cuda::stream_wait_event": ControlKind.STREAM_WAIT_EVENT,
    "cuda::event_synchronize": ControlKind.EVENT_SYNCHRONIZE,
}


def _number(signature: Signature, name: str) -> int:
    number = whole(signature, name, -1)
    if not -1 <= number < _MOST_NUMBERS:
        raise TraincastError(f"{name} {number} is not from -1 to {_MOST_NUMBERS - 1}")
    return number


@lowers(*_KINDS)
def control(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A control op is one control item."""
    return (Control(_KINDS[signature.name], event=_number(signature, "event"), stream=_number(signature, "stream")),)


@lowers("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero")
def item(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """`item()`: the value is copied to the host, which waits for it."""
    source = signature.inputs[0]
    if not on_device(source):
        return ()
    return (memcpy("d2h_pageable", source.itemsize), STREAM_SYNCHRONIZE)


@lowers("aten::equal")
def equal(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """`torch.equal`: compare, reduce, and hand the answer to the host."""
    left = signature.inputs[0]
    if not on_device(left):
        return ()
    return (
        elementwise("compare", signature.inputs, (left,)),
        reduction("full", left, ()),
        memcpy("d2h_pageable", 1),
        STREAM_SYNCHRONIZE,
    )

"""Which ops of a step exchange gradients as DistributedDataParallel does: into buckets, all-reduces, copies back."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import Phase
from traincast.ir.rows import OpRow, ScopeRow
from traincast.transforms.streams import RECORD, WAIT
from traincast.utils.errors import TraincastError

ACCUMULATE = "torch::autograd::AccumulateGrad"
BROADCAST = "torch.distributed::_broadcast_coalesced"
"""The scope in which buffers are sent before forward."""
_ALL_REDUCE = "c10d::allreduce_"
_COPIES = ("aten::copy_", "aten::mul")
"""What puts a gradient into its bucket."""


def reduction_ops(editor: ProgramEditor, scopes: Sequence[ScopeRow]) -> set[OpRow]:
    """Ops of these scopes that are left out without an exchange of gradients."""
    ops = [op for scope in scopes for op in scope.ops]
    buckets = _buckets(editor, ops)
    _check(editor, scopes, buckets)
    found: set[OpRow] = set()
    events: set[int] = set()
    for place, op in enumerate(ops):
        if not any(editor.tensors[tensor] in buckets for tensor in (*op.inputs, *op.outputs)):
            continue
        found.add(op)
        if op.signature.name == _ALL_REDUCE:
            events |= _events(ops, place)
    waits = (op for op in ops if op.signature.name in (RECORD, WAIT) and op.signature.scalar("event") in events)
    return found.union(waits)


def _buckets(editor: ProgramEditor, ops: Sequence[OpRow]) -> set[int]:
    """Memory that is there before the step and is all-reduced in it."""
    reduced = [editor.tensors[op.inputs[0]] for op in ops if op.signature.name == _ALL_REDUCE]
    return {storage for storage in reduced if not editor.storages[storage].made}


def _events(ops: Sequence[OpRow], place: int) -> set[int]:
    """The events of a collective: one before it that its stream waits for, and one of its end."""
    around = [ops[n] for n in (place - 2, place + 1) if 0 <= n < len(ops)]
    found = [op.signature.scalar("event") for op in around if op.signature.name == RECORD]
    return {event for event in found if isinstance(event, int)}


def _check(editor: ProgramEditor, scopes: Sequence[ScopeRow], buckets: set[int]) -> None:
    """Refuses exchanges of gradients that are no plain all-reduces of buckets."""
    for scope in scopes:
        for op in scope.ops:
            kind = op.signature.scalar("collective")
            if scope.phase == Phase.BACKWARD and kind == "reduce_scatter":
                raise TraincastError(
                    f"its ranks share gradients ({kind}), and whether each pass does so is a choice of the program; "
                    "capture the step with the passes you run"
                )
            copied = scope.name == ACCUMULATE and op.signature.name in _COPIES
            into = {editor.tensors[tensor] for tensor in op.outputs if not editor.storage_of(tensor).made}
            if copied and not into <= buckets:
                raise TraincastError(
                    "its gradients are exchanged by a hook of its own; capture the step with the passes you run"
                )

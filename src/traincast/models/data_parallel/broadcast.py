"""Buffers (running means, masks) that `DistributedDataParallel` sends from rank 0 to all others before forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.models.data_parallel.buckets import Bucket, InsertingBuilder, assign_buckets
from traincast.models.layers.builder import Communicator, Ref, Scalars
from traincast.utils.errors import TraincastError

_PIECE_BYTES = 250 << 20  # `broadcast_bucket_size` of DistributedDataParallel
_IN_FLIGHT = 2  # of `broadcast_coalesced` in PyTorch's comm.cpp
_MODULE = "DistributedDataParallel"
_SCOPE = "torch.distributed::_broadcast_coalesced"


@dataclass(frozen=True, slots=True)
class _BufferBucket:
    """Buffers that travel together in `flat`; `event` ends their broadcast."""

    bucket: Bucket
    flat: Ref
    event: int


def find_buffers(program: Program) -> list[Ref]:
    """The buffers on the device that some op of the step takes as a whole, in the order they were made."""
    c = program.columns
    wanted = (c.storage_kind == StorageKind.BUFFER) & ~program.storages.on_host
    buffers: dict[int, Ref] = {}
    for entry in np.flatnonzero(wanted[c.tensor_storage[c.input_tensor]]).tolist():
        tensor = int(c.input_tensor[entry])
        storage = int(c.tensor_storage[tensor])
        op = int(np.searchsorted(c.input_ptr, entry, side="right")) - 1
        spec = program.signatures[c.op_signature[op]].inputs[entry - int(c.input_ptr[op])]
        if storage not in buffers and spec.nbytes == program.storage_nbytes[storage]:
            buffers[storage] = Ref(tensor, storage, spec)
    return [buffers[storage] for storage in sorted(buffers)]


def broadcast_buffers(builder: InsertingBuilder, group: Communicator, buffers: Sequence[Ref]) -> None:
    """Broadcasts before the module's forward: flattened by type, two pieces in flight, copied back where they were."""
    for buffer in buffers:
        if not buffer.spec.is_contiguous:
            raise TraincastError(
                "a buffer of the model is not contiguous, and how it is broadcast was not recorded; "
                "capture the step under DistributedDataParallel with `gpus`"
            )
    if not buffers:
        return
    builder.insert_before(_find_first_scope(builder.program))
    builder.open_scope(_SCOPE, Phase.FORWARD)
    flying: list[_BufferBucket] = []
    for bucket in assign_buckets([buffer.spec for buffer in buffers], [_PIECE_BYTES], sort=True):
        flat = _flatten_buffers(builder, bucket, [buffers[i] for i in bucket.members])
        if len(flying) == _IN_FLIGHT:
            _copy_back(builder, flying.pop(0), buffers)
        root: Scalars = (("root", group.ranks[0]),)
        event = builder.add_collective(
            "broadcast_", "broadcast", group, [("tensors", flat)], flat, nbytes=flat.spec.nbytes, details=root,
            module=_MODULE,
        )  # fmt: skip
        flying.append(_BufferBucket(bucket, flat, event))
    for block in flying:
        _copy_back(builder, block, buffers)


def _find_first_scope(program: Program) -> int:
    """Where the forward pass of the module with the parameters begins."""
    c = program.columns
    entries = np.flatnonzero(c.storage_kind[c.tensor_storage[c.input_tensor]] == StorageKind.PARAMETER)
    ops = np.searchsorted(c.input_ptr, entries, side="right") - 1
    ops = ops[program.op_phase[ops] == Phase.FORWARD]
    if not len(ops):
        return 0
    root = program.names[c.op_module[ops[0]]].partition(".")[0]
    inside = [name.partition(".")[0] == root for name in program.names]
    first = int(np.flatnonzero(np.array(inside)[c.op_module] & (program.op_phase == Phase.FORWARD))[0])
    scope = int(program.op_scope[first])
    empty = (np.diff(c.scope_ptr) == 0) & (c.scope_phase == Phase.FORWARD)
    while scope and empty[scope - 1]:
        scope -= 1
    return scope


def _flatten_buffers(builder: InsertingBuilder, bucket: Bucket, members: Sequence[Ref]) -> Ref:
    """The buffers as one flat tensor: a copy, unless there is only one."""
    lines = [builder.add_view(member, (member.spec.numel,)) for member in members]
    for member, line in zip(members, lines, strict=True):
        builder.add_op("aten::view", [("self", member)], [line], [("size", (-1,))], module=_MODULE)
    if len(members) == 1:
        return lines[0]
    flat = builder.add_tensor((bucket.numel,), bucket.dtype)
    builder.add_op("aten::cat", [("tensors", lines)], [flat], [("dim", 0)], module=_MODULE)
    return flat


def _copy_back(builder: InsertingBuilder, block: _BufferBucket, buffers: Sequence[Ref]) -> None:
    """The stream waits for a piece, and its parts are copied back into the buffers."""
    members = [buffers[index] for index in block.bucket.members]
    builder.wait_for_event(block.event, module=_MODULE)
    parts = []
    for buffer, offset in zip(members, block.bucket.offsets, strict=True):
        line, _ = builder.add_slice(block.flat, 0, offset, offset + buffer.spec.numel, module=_MODULE)
        parts.append(builder.add_view(line, buffer.shape))
        builder.add_op("aten::view", [("self", line)], [parts[-1]], [("size", buffer.shape)], module=_MODULE)
    for buffer, part in zip(members, parts, strict=True):
        arguments = [("self", buffer), ("src", part)]
        builder.add_op("aten::copy_", arguments, [buffer], [("non_blocking", True)], module=_MODULE)
    if block.flat.storage != members[0].storage:
        builder.free_tensors(block.flat)

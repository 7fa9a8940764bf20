"""Buffers (running means, masks) that `DistributedDataParallel` sends from rank 0 to all others before forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.errors import TraincastError
from traincast.programs.data_parallel.buckets import Bucket, assign_buckets
from traincast.programs.data_parallel.communicator import Communicator, Place
from traincast.workload.ops import DTYPE_BYTES, Phase, Signature, StorageKind, TensorSpec
from traincast.workload.program import Program
from traincast.workload.splice import Splice

_PIECE_BYTES = 250 << 20
_IN_FLIGHT = 2
_MODULE = "DistributedDataParallel"
_SCOPE = "torch.distributed::_broadcast_coalesced"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that the step uses."""

    tensor: int
    storage: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class _Piece:
    """Buffers that travel together, in `tensor` on `storage`; `event` ends their broadcast."""

    bucket: Bucket
    tensor: int
    storage: int
    event: int


def buffers_of(program: Program) -> list[Buffer]:
    """The buffers on the device that some op of the step takes as a whole, in the order they were made."""
    c = program.columns
    wanted = (c.storage_kind == StorageKind.BUFFER) & ~program.storages.on_host
    found: dict[int, Buffer] = {}
    for entry in np.flatnonzero(wanted[c.tensor_storage[c.input_tensor]]).tolist():
        tensor = int(c.input_tensor[entry])
        storage = int(c.tensor_storage[tensor])
        op = int(np.searchsorted(c.input_ptr, entry, side="right")) - 1
        spec = program.signatures[c.op_signature[op]].inputs[entry - int(c.input_ptr[op])]
        if storage not in found and spec.nbytes == program.storage_nbytes[storage]:
            found[storage] = Buffer(tensor, storage, spec)
    return [found[storage] for storage in sorted(found)]


def broadcast_buffers(comm: Communicator, buffers: Sequence[Buffer]) -> None:
    """Broadcasts before the module's forward: flattened by type, two pieces in flight, copied back where they were."""
    for buffer in buffers:
        if not buffer.spec.is_contiguous:
            raise TraincastError(
                "a buffer of the model is not contiguous, and how it is broadcast was not recorded; "
                "capture the step under DistributedDataParallel with --gpus"
            )
    if not buffers:
        return
    scope = comm.splice.scope(_SCOPE, Phase.FORWARD, before=_first_scope(comm.splice.program))
    place = Place(scope, module=_MODULE)
    flying: list[_Piece] = []
    for bucket in assign_buckets([b.spec for b in buffers], [_PIECE_BYTES], sort=True):
        members = [buffers[i] for i in bucket.members]
        tensor, storage = _flatten(comm.splice, bucket, members, scope)
        if len(flying) == _IN_FLIGHT:
            _land(comm, flying.pop(0), buffers, place)
        root = (("root", comm.ranks[0]),)
        event = comm.collective("broadcast_", "broadcast", tensor, bucket.flat, place, root)
        flying.append(_Piece(bucket, tensor, storage, event))
    for piece in flying:
        _land(comm, piece, buffers, place)


def _first_scope(program: Program) -> int:
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


def _flatten(splice: Splice, bucket: Bucket, members: Sequence[Buffer], scope: int) -> tuple[int, int]:
    """The buffers as one flat tensor: a copy, unless there is only one."""
    views = [splice.tensor(member.storage) for member in members]
    specs = [TensorSpec((member.spec.numel,), (1,), member.spec.dtype) for member in members]
    for member, view, spec in zip(members, views, specs, strict=True):
        signature = Signature("aten::view", (member.spec,), (spec,), (("size", (-1,)),), (("self", 1),))
        splice.op(signature, [member.tensor], [view], scope=scope, module=_MODULE)
    if len(members) == 1:
        return views[0], members[0].storage
    storage = splice.storage(bucket.numel * DTYPE_BYTES[bucket.dtype], StorageKind.ACTIVATION, alloc=splice.next_op)
    flat = splice.tensor(storage)
    joined = Signature("aten::cat", tuple(specs), (bucket.flat,), (("dim", 0),), (("tensors", len(members)),))
    splice.op(joined, views, [flat], scope=scope, module=_MODULE)
    return flat, storage


def _land(comm: Communicator, piece: _Piece, buffers: Sequence[Buffer], place: Place) -> None:
    """The stream waits for a piece, and its parts are copied back into the buffers."""
    splice, bucket, scope = comm.splice, piece.bucket, place.scope
    comm.wait(piece.event, place)
    parts = []
    for index, offset in zip(bucket.members, bucket.offsets, strict=True):
        spec = buffers[index].spec
        line = TensorSpec((spec.numel,), (1,), spec.dtype)
        slice_, part = splice.tensor(piece.storage), splice.tensor(piece.storage)
        scalars = (("dim", 0), ("start", offset), ("end", offset + spec.numel), ("step", 1))
        cut = Signature("aten::slice", (bucket.flat,), (line,), scalars, (("self", 1),), "Tensor")
        splice.op(cut, [piece.tensor], [slice_], scope=scope, module=_MODULE)
        shaped = Signature("aten::view", (line,), (spec,), (("size", spec.shape),), (("self", 1),))
        splice.op(shaped, [slice_], [part], scope=scope, module=_MODULE)
        parts.append(part)
    for index, part in zip(bucket.members, parts, strict=True):
        buffer = buffers[index]
        groups = (("self", 1), ("src", 1))
        copied = Signature("aten::copy_", (buffer.spec, buffer.spec), (buffer.spec,), (("non_blocking", True),), groups)
        splice.op(copied, [buffer.tensor, part], [buffer.tensor], scope=scope, module=_MODULE)
    if piece.storage != buffers[bucket.members[0]].storage:
        splice.storage_free[piece.storage] = splice.last_op

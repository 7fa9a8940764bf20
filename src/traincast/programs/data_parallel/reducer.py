"""What `DistributedDataParallel` does with gradients: buckets, all-reduces while backward goes on, copies back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traincast.programs.data_parallel.buckets import Bucket
from traincast.programs.data_parallel.communicator import Communicator, Place
from traincast.workload.ops import DTYPE_BYTES, Phase, Signature, StorageKind, TensorSpec
from traincast.workload.splice import Splice

_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that is ready when a scope ends: its tensor there, and the stream it is made on."""

    scope: int
    tensor: int
    spec: TensorSpec
    stream: int


def reduce_gradients(comm: Communicator, gradients: Sequence[Gradient], buckets: Sequence[Bucket], end: int) -> None:
    """Every gradient copied into its bucket and divided; a bucket reduced once it and those before it are full; at
    the end of backward a wait for each, and its gradients copied back."""
    splice = comm.splice
    flats = [splice.storage(b.numel * DTYPE_BYTES[b.dtype], StorageKind.GRADIENT) for b in buckets]
    whole = [splice.tensor(flat) for flat in flats]
    bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.members}
    pending = [len(bucket.members) for bucket in buckets]
    done: list[int] = []
    for index, gradient in enumerate(gradients):
        number = bucket_of[index]
        place = Place(gradient.scope, gradient.stream)
        _copy_in(splice, gradient, splice.tensor(flats[number]), place, 1.0 / len(comm.ranks))
        pending[number] -= 1
        while len(done) < len(buckets) and not pending[len(done)]:
            ready = len(done)
            done.append(comm.collective("allreduce_", "all_reduce", whole[ready], buckets[ready].flat, place))
    for number, bucket in enumerate(buckets):
        scope = _end_scope(splice, "cuda::stream_wait_event", Phase.OTHER, end)
        comm.wait(done[number], Place(scope))
        members = [gradients[index] for index in bucket.members]
        last = _copy_back(splice, bucket, members, whole[number], flats[number], end)
    if end < splice.program.num_scopes:
        splice.scope_after[end] = last


def _copy_in(splice: Splice, gradient: Gradient, slot: int, place: Place, factor: float) -> None:
    spec = gradient.spec
    signature = Signature("aten::mul", (spec, spec), (spec,), (("other", factor),), (("self", 1), ("out", 1)), "out")
    splice.op(signature, [gradient.tensor, slot], [slot], scope=place.scope, stream=place.stream)


def _copy_back(splice: Splice, bucket: Bucket, members: Sequence[Gradient], whole: int, storage: int, end: int) -> int:
    """Views of the bucket, then a copy out of each; gives the last scope."""
    views = [splice.tensor(storage) for _ in members]
    for gradient, offset, view in zip(members, bucket.offsets, views, strict=True):
        spec = gradient.spec
        scalars = (("size", spec.shape), ("stride", spec.stride), ("storage_offset", offset))
        scope = _end_scope(splice, "aten::as_strided", Phase.BACKWARD, end)
        splice.op(Signature("aten::as_strided", (bucket.flat,), (spec,), scalars, (("self", 1),)), [whole], [view],
                  scope=scope)  # fmt: skip
    for gradient, view in zip(members, views, strict=True):
        spec = gradient.spec
        signature = Signature(
            "aten::copy_", (spec, spec), (spec,), (("non_blocking", False),), (("self", 1), ("src", 1))
        )
        scope = _end_scope(splice, _COPY_BACK, Phase.BACKWARD, end)
        splice.op(signature, [gradient.tensor, view], [gradient.tensor], scope=scope)
    return scope


def _end_scope(splice: Splice, name: str, phase: Phase, end: int) -> int:
    """A scope at the end of backward, on its thread."""
    return splice.scope(name, phase, before=end, thread=int(splice.program.columns.scope_thread[end - 1]))

"""Data parallelism: any training step of one GPU as `DistributedDataParallel` runs it on many. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.ir.ops import ACCUMULATE_GRAD, StorageKind
from traincast.ir.program import Program, find_storages_of_ops
from traincast.ir.workload import Workload, follows_tensors
from traincast.models.data_parallel.broadcast import broadcast_buffers, find_buffers
from traincast.models.data_parallel.buckets import BUCKET_BYTES, MIB, InsertingBuilder, Reducer
from traincast.models.layers.builder import Communicator, Ref
from traincast.utils.errors import TraincastError

MAX_GPUS = 1 << 16
_FUSED_UPDATE = re.compile("traincast::batched_embedding_backward_|fbgemm::split_embedding_backward_codegen_")
"""Ops of the backward pass that update tables; a compiled step shows them by their names only."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that is ready when a scope ends, and the stream it is made on."""

    grad: Ref
    scope: int
    stream: int


def apply_data_parallel(workload: Workload, gpus: int, *, bucket_mb: float | None = None) -> Workload:
    """The workload on `gpus` GPUs, each with its own samples: training under `DistributedDataParallel`, inference as
    copies that know nothing of each other. The batch size stays that of one GPU.

    `bucket_mb` is DDP's `bucket_cap_mb`, in MiB; None is its default: 25, and 1 for the first bucket.
    """
    if not 1 <= gpus <= MAX_GPUS:
        raise TraincastError(f"{gpus} GPUs are out of range; give an integer from 1 to {MAX_GPUS}")
    if len(workload.ranks) != 1:
        raise TraincastError(f"workload '{workload.name}' runs on {len(workload.ranks)} GPUs already; leave `gpus` out")
    if gpus == 1:
        return workload
    program = workload.programs[0]
    if workload.mode == "training":
        check_data_parallel(workload)
        program = add_ddp(program, tuple(range(gpus)), bucket_mb=bucket_mb)
    return replace(workload, programs=(program,), ranks=(0,) * gpus)


def replicate_on_gpus(workload: Workload, gpus: int | None) -> Workload:
    """The workload on this many GPUs; None leaves it on its own number. One of many ranks runs on no other number."""
    ranks = len(workload.ranks)
    if gpus is None or gpus == ranks:
        return workload
    if ranks > 1:
        raise TraincastError(
            f"workload '{workload.name}' was made for {ranks} GPUs and cannot run on {gpus}; leave `gpus` out"
        )
    return apply_data_parallel(workload, gpus)


def add_ddp(
    program: Program,
    ranks: tuple[int, ...],
    *,
    bucket_mb: float | None = None,
    communicator: int = 0,
    buffers: bool = True,
) -> Program:
    """A rank's program with the gradients that its backward pass accumulates averaged over `ranks`.

    Gradients that are applied inside backward (fused embedding tables) are not accumulated and stay as they are.
    `buffers`: they are broadcast before forward.
    """
    if bucket_mb is not None and not bucket_mb > 0:
        raise TraincastError(f"buckets of {bucket_mb} MiB are impossible; give a size above 0")
    gradients = find_gradients(program)
    if not gradients:
        return program
    sent = find_buffers(program) if buffers else []
    group = Communicator(communicator, ranks)
    builder = InsertingBuilder(program, group)
    broadcast_buffers(builder, group, sent)
    end = find_end_of_backward(program, [gradient.scope for gradient in gradients])
    limits = BUCKET_BYTES if bucket_mb is None else (bucket_mb * MIB,)
    _write_reduction(builder, group, gradients, limits, end)
    _hold_until_backward_returns(builder, end)
    tensors = [g.grad.tensor for g in gradients] + [buffer.tensor for buffer in sent]
    return replace(builder.build_program(), rigid=program.rigid or explain_fixed_size(program, tensors))


def check_data_parallel(workload: Workload) -> None:
    """Rejects a program whose gradients data parallelism cannot see."""
    program = workload.programs[0]
    c = program.columns
    if any(signature.scalar("collective") is not None for signature in program.symbolic):
        raise TraincastError(f"workload '{workload.name}' communicates already; capture it with `gpus` instead")
    accumulated = find_accumulating(program)
    if not len(accumulated):
        raise TraincastError(f"workload '{workload.name}' accumulates no gradients; only training is data parallel")
    unseen = bool(np.any(c.scope_ptr[accumulated] == c.scope_ptr[accumulated + 1]))
    if unseen and not follows_tensors(program):
        raise TraincastError(
            f"workload '{workload.name}' does not show which gradients are accumulated, as a trace does not; trace or "
            "capture the step you run with `gpus`"
        )
    fused = any(_FUSED_UPDATE.match(signature.name) for signature in program.symbolic)
    if fused or unseen:
        raise TraincastError(
            f"workload '{workload.name}' updates parameters inside its backward pass (fused embedding tables), which "
            "DistributedDataParallel cannot average; shard the tables, or capture the step you run with `gpus`"
        )


def find_accumulating(program: Program) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Scopes that accumulate a gradient."""
    if ACCUMULATE_GRAD not in program.names:
        return np.zeros(0, dtype=np.intp)
    return np.flatnonzero(program.columns.scope_name == program.names.index(ACCUMULATE_GRAD))


def _write_reduction(
    builder: InsertingBuilder, group: Communicator, gradients: Sequence[Gradient], limits: Sequence[float], end: int
) -> None:
    """Every gradient into its bucket where it is ready; waits and copies back before scope `end`."""
    forms = [gradient.grad.spec for gradient in gradients]
    reducer = Reducer(builder, group, forms, limits_bytes=limits, kind=StorageKind.GRADIENT)
    for gradient in gradients:
        builder.append_to(gradient.scope)
        reducer.reduce_gradient(gradient.grad, stream=gradient.stream)
    builder.insert_before(end)
    reducer.finish_reduction()
    if end < builder.program.num_scopes:
        builder.insertion.set_wait(end)


def find_gradients(program: Program) -> list[Gradient]:
    """The gradients in the order in which they become ready."""
    c = program.columns
    gradients = []
    for scope in find_accumulating(program).tolist():
        last = int(c.scope_ptr[scope + 1]) - 1
        if last < c.scope_ptr[scope]:
            continue
        signature = program.signatures[c.op_signature[last]]
        if len(signature.outputs) != 1:
            raise TraincastError("a sparse gradient cannot be reduced in buckets; use dense embeddings, or shard them")
        tensor = int(c.output_tensor[c.output_ptr[last]])
        grad = Ref(tensor, int(c.tensor_storage[tensor]), signature.outputs[0])
        gradients.append(Gradient(grad, scope, int(c.op_stream[last])))
    return gradients


def find_end_of_backward(program: Program, accumulating: Sequence[int]) -> int:
    """The scope before which backward, in which these scopes accumulate gradients, has returned."""
    thread = program.columns.scope_thread
    first, last = accumulating[0], accumulating[-1]
    if np.any(thread[first : last + 1] != thread[last]):
        raise TraincastError(
            "the step runs several backward passes, and whether each of them reduces gradients is not recorded; "
            "capture it under DistributedDataParallel with `gpus`"
        )
    others = np.flatnonzero(thread[last:] != thread[last])
    return last + int(others[0]) if len(others) else program.num_scopes


def explain_fixed_size(program: Program, tensors: Sequence[int]) -> str:
    """Gradients and buffers whose bytes change with batch size or sequence length would be in other buckets there."""
    c = program.columns
    sizes = c.storage_bytes[c.tensor_storage[tensors]]
    if not np.any(program.sizes.coefficients[sizes, 1:]):
        return ""
    return "its gradients or buffers change with it; resize the workload before making it data parallel"


def _hold_until_backward_returns(builder: InsertingBuilder, end: int) -> None:
    """What was freed after backward's last op, and not by it, was held by the call: now until gradients are back."""
    program = builder.program
    c = program.columns
    last = int(c.scope_ptr[end]) - 1
    held = c.storage_free == last
    held[find_storages_of_ops(program, int(c.scope_ptr[program.op_scope[last]]), last + 1)] = False
    for storage in np.flatnonzero(held).tolist():
        builder.insertion.free_storage(storage)

"""Data parallelism: any step of one GPU as `DistributedDataParallel` runs it on many, gradients in PyTorch's buckets.
Needs no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import ACCUMULATE_GRAD, Phase, StorageKind, TensorSpec
from traincast.ir.program import Program, find_storages_of_ops
from traincast.ir.workload import Workload, follows_tensors
from traincast.models.layers.builder import Communicator, Ref, Scalars, StepBuilder
from traincast.utils.errors import TraincastError

MIB = 1 << 20
BUCKET_BYTES = (MIB, 25 * MIB)
"""DDP's defaults: bytes of the first bucket, which should be on its way early, and of all others."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one type in one flat buffer. `members` are indices into what was given, `offsets` count elements."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: str

    @property
    def flat(self) -> TensorSpec:
        """The buffer's form."""
        return TensorSpec((self.numel,), (1,), self.dtype)


def assign_buckets(
    specs: Sequence[TensorSpec], limits_bytes: Sequence[float], *, sort: bool = False
) -> tuple[Bucket, ...]:
    """Fills a bucket per type in the order given until it reaches its limit: the first limit for the first bucket of
    a type, and so on; the last limit for all further ones. `sort`: in the order of their first members.

    >>> one = TensorSpec((256,), (1,), "float32")
    >>> [bucket.members for bucket in assign_buckets([one] * 5, [1024, 2048])]
    [(0,), (1, 2), (3, 4)]
    """
    open_buckets: dict[str, list[int]] = {}
    open_bytes: Counter[str] = Counter()
    filled: Counter[str] = Counter()
    closed: list[list[int]] = []
    for index, spec in enumerate(specs):
        open_buckets.setdefault(spec.dtype, []).append(index)
        open_bytes[spec.dtype] += spec.nbytes
        if open_bytes[spec.dtype] >= limits_bytes[min(filled[spec.dtype], len(limits_bytes) - 1)]:
            closed.append(open_buckets.pop(spec.dtype))
            del open_bytes[spec.dtype]
            filled[spec.dtype] += 1
    closed += open_buckets.values()
    if sort:
        closed.sort()
    return tuple(_make_bucket(specs, members) for members in closed)


def _make_bucket(specs: Sequence[TensorSpec], members: Sequence[int]) -> Bucket:
    offsets, numel = [], 0
    for index in members:
        offsets.append(numel)
        numel += specs[index].numel
    return Bucket(tuple(members), tuple(offsets), numel, specs[members[0]].dtype)


class InsertingBuilder(StepBuilder):
    """Writes into `program`, in which `group` communicates on the stream it has there, or on the next free one."""

    def __init__(self, program: Program, group: Communicator) -> None:
        self.program, self.editor = program, ProgramEditor(program)
        self.insertion = self.editor.insertion
        super().__init__(program.batch_size, target=self.insertion)
        self.continue_from(program, group)

    def append_to(self, scope: int) -> None:
        """What follows goes to the end of a scope."""
        self.insertion.append_to(scope)

    def insert_before(self, scope: int) -> None:
        """Scopes that follow are new ones before this one, on the thread of the one they come after."""
        self.insertion.insert_before(scope)
        self.engine_thread = int(self.program.columns.scope_thread[scope - 1]) if scope else 0

    def build_program(self) -> Program:
        """The program with what is new in place."""
        return self.editor.build()


_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


class Reducer:
    """DDP's reducer of one module: gradients are copied into buckets as they come, and full buckets all-reduced.

    `forms` are those of the gradients in the order in which they come, `kind` is what buckets count as in memory.
    With `as_views` gradients become views of their buckets (`gradient_as_bucket_view`): nothing is copied back.
    """

    def __init__(
        self,
        builder: StepBuilder,
        group: Communicator,
        forms: Sequence[TensorSpec],
        *,
        limits_bytes: Sequence[float] = BUCKET_BYTES,
        kind: StorageKind = StorageKind.BUFFER,
        as_views: bool = False,
    ) -> None:
        self.builder, self.group, self.forms, self.as_views = builder, group, forms, as_views
        self._buckets = assign_buckets(forms, limits_bytes)
        self._flat = [builder.add_resident_tensor((bucket.numel,), kind, bucket.dtype) for bucket in self._buckets]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.members}
        self._pending = [len(bucket.members) for bucket in self._buckets]
        self._grads: list[Ref] = []
        self._events: list[int] = []

    def drop_gradients(self) -> None:
        """The gradients of the step before go; views of buckets stay with them."""
        for form in () if self.as_views else self.forms:
            self.builder.free_tensors(self.builder.add_resident_tensor(form.shape, StorageKind.GRADIENT, form.dtype))

    def accumulate_gradient(self, grad: Ref) -> Ref:
        """A gradient has come where there was none; gives the tensor that the optimizer will read."""
        builder = self.builder
        builder.open_scope(ACCUMULATE_GRAD)
        kept = builder.add_view(grad, grad.shape)
        builder.add_op("aten::detach", [("self", grad)], [kept])
        if not self.as_views:
            builder.target.set_kind(grad.storage, StorageKind.GRADIENT)
        return self.reduce_gradient(kept)

    def reduce_gradient(self, grad: Ref, *, stream: int = 0) -> Ref:
        """Copies the next gradient into its bucket, divided by the ranks; gives the tensor that the optimizer will
        read. A bucket is reduced once it and those before it are full."""
        builder, number = self.builder, self._bucket_of[len(self._grads)]
        slot = builder.add_view(self._flat[number], grad.shape, grad.spec.stride)
        divided: Scalars = [("other", 1.0 / len(self.group.ranks))]
        arguments = [("self", grad), ("out", slot)]
        builder.add_op("aten::mul", arguments, [slot], divided, overload="out", stream=stream)
        if self.as_views:
            builder.free_tensors(grad)
        self._grads.append(slot if self.as_views else grad)
        self._pending[number] -= 1
        while len(self._events) < len(self._buckets) and not self._pending[len(self._events)]:
            self._events.append(builder.add_all_reduce(self.group, self._flat[len(self._events)], stream=stream))
        return self._grads[-1]

    def finish_reduction(self) -> None:
        """At the end of backward: the stream waits for each bucket, and gradients are copied back unless views."""
        builder = self.builder
        for bucket, flat, event in zip(self._buckets, self._flat, self._events, strict=True):
            builder.open_engine_scope("cuda::stream_wait_event", Phase.OTHER)
            builder.wait_for_event(event)
            grads = [self._grads[index] for index in bucket.members]
            views = [builder.add_view(flat, grad.shape, grad.spec.stride) for grad in grads]
            for view, offset in zip(views, bucket.offsets, strict=True):
                builder.open_engine_scope("aten::as_strided", Phase.BACKWARD)
                scalars: Scalars = [("size", view.shape), ("stride", view.spec.stride), ("storage_offset", offset)]
                builder.add_op("aten::as_strided", [("self", flat)], [view], scalars)
            if self.as_views:
                continue
            for grad, view in zip(grads, views, strict=True):
                builder.open_engine_scope(_COPY_BACK, Phase.BACKWARD)
                builder.add_op("aten::copy_", [("self", grad), ("src", view)], [grad], [("non_blocking", False)])


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

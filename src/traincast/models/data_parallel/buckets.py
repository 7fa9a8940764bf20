"""What `DistributedDataParallel` does with gradients: PyTorch's bucket assignment without PyTorch, all-reduces while
backward goes on, copies back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import ACCUMULATE_GRAD, Phase, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.models.layers.builder import Communicator, Ref, Scalars, StepBuilder

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

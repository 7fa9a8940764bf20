"""Writing a program by hand the way a capture would: tensors with forms and storages, ops with named arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from traincast.ir.builder import ProgramBuilder, SizesBuilder
from traincast.ir.ops import DTYPE_BYTES, Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program

Arguments: TypeAlias = "Sequence[tuple[str, Ref | Sequence[Ref]]]"
Scalars: TypeAlias = Sequence[tuple[str, Scalar]]


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the program being written."""

    tensor: int
    storage: int
    spec: TensorSpec

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""
        return self.spec.shape


def compute_contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group: its number and its global ranks in group order."""

    number: int
    ranks: tuple[int, ...]


class StepBuilder:
    """Writes a step op by op into `target`: makes tensors from shapes and fills in signatures.

    Backward scopes are on thread 1; changes of thread are tied together as autograd's are. `half` is the type that
    autocast turns operands of GEMMs into ("" without autocast). `engine_ops_apart`: what the autograd engine
    runs after a node (sums of gradients) are host ops of their own, as PyTorch 1.8's profiler shows them.
    Each communicator has a stream of its own, numbered from 1 in order of first use. `labels` has an entry for every
    scope: what it was `label_scopes` (None: nothing).
    """

    half: str = ""
    engine_ops_apart: bool = False
    engine_thread: int = 1
    stream: int = 0  # on which ops run that name no other

    def __init__(self, batch_size: int, *, target: ProgramBuilder | None = None) -> None:
        self.batch_size = batch_size
        self.target = ProgramBuilder(batch_size=batch_size) if target is None else target
        self.labels: list[object] = []
        self._label: object = None
        self._thread = 0
        self._phase = Phase.FORWARD
        self._streams: dict[int, int] = {}
        self._events = 0

    def continue_from(self, program: Program, group: Communicator) -> None:
        """What is written goes with the ops of a program: events have other numbers than its own, and `group`
        communicates on the stream that it has there, or on the next free one."""
        events = [signature.scalar("event") for signature in program.signatures]
        self._events = 1 + max((event for event in events if isinstance(event, int)), default=-1)
        self._streams[group.number] = _find_stream(program, group.number)

    def stream_of(self, group: Communicator) -> int:
        """The stream on which a communicator runs its collectives: its own, or the next one."""
        return self._streams.setdefault(group.number, 1 + max(self._streams.values(), default=0))

    @contextmanager
    def label_scopes(self, label: object) -> Iterator[None]:
        """Gives a label to the scopes that are opened inside."""
        before, self._label = self._label, label
        yield
        self._label = before

    def _add_tensor(self, storage: int, shape: Sequence[int], stride: Sequence[int], dtype: str, device: str) -> Ref:
        spec = TensorSpec(tuple(shape), tuple(stride), dtype, device)
        return Ref(self.target.add_tensor(storage), storage, spec)

    def _add_storage(self, shape: Sequence[int], dtype: str, device: str, kind: StorageKind, *, before: bool) -> int:
        elements = 1
        for size in shape:
            elements *= size
        # host memory takes no device bytes
        nbytes = elements * DTYPE_BYTES[dtype] if device == "cuda" else 0
        return self.target.add_storage(nbytes, kind, before_step=before)

    def add_resident_tensor(
        self, shape: Sequence[int], kind: StorageKind, dtype: str = "float32", device: str = "cuda"
    ) -> Ref:
        """A tensor that is there before the step."""
        storage = self._add_storage(shape, dtype, device, kind, before=True)
        return self._add_tensor(storage, shape, compute_contiguous_strides(shape), dtype, device)

    def add_tensor(
        self, shape: Sequence[int], dtype: str = "float32", device: str = "cuda", stride: Sequence[int] | None = None
    ) -> Ref:
        """A tensor that the next op allocates."""
        storage = self._add_storage(shape, dtype, device, StorageKind.ACTIVATION, before=False)
        return self._add_tensor(
            storage, shape, compute_contiguous_strides(shape) if stride is None else stride, dtype, device
        )

    def add_view(self, of: Ref, shape: Sequence[int], stride: Sequence[int] | None = None) -> Ref:
        """Another tensor on the same storage."""
        strides = compute_contiguous_strides(shape) if stride is None else stride
        return self._add_tensor(of.storage, shape, strides, of.spec.dtype, of.spec.device)

    def add_reinterpreted_view(self, of: Ref, shape: Sequence[int], stride: Sequence[int], dtype: str) -> Ref:
        """The same storage seen as another type: a stub for a copy that is not counted as memory."""
        return self._add_tensor(of.storage, shape, stride, dtype, of.spec.device)

    def open_scope(self, name: str, phase: Phase | None = None) -> None:
        """Opens a top-level host op; without a phase it stays in the one before. Backward runs on its own thread."""
        phase = self._phase if phase is None else phase
        thread = int(phase == Phase.BACKWARD and not name.startswith("aten::ones_like"))
        self.open_scope_on(thread, name, phase, after=self.target.last_scope if thread != self._thread else -1)

    def open_scope_on(self, thread: int, name: str, phase: Phase, *, after: int = -1) -> None:
        """Opens a top-level host op on a thread, which waits for the scope `after` (-1: for none)."""
        self._phase, self._thread = phase, thread
        self.target.open_scope(name, phase, thread=thread, after=after)
        self.labels.append(self._label)

    def add_op(
        self,
        name: str,
        arguments: Arguments,
        outputs: Sequence[Ref] = (),
        scalars: Scalars = (),
        *,
        overload: str = "",
        module: str = "",
        forward: int = -1,
        stream: int = 0,
    ) -> int:
        """Adds an op to the open scope; gives its index."""
        inputs: list[Ref] = []
        groups: list[tuple[str, int]] = []
        for key, value in arguments:
            if isinstance(value, Ref):
                inputs.append(value)
                groups.append((key, 1))
            else:
                inputs.extend(value)
                groups.append((key, len(value)))
        signature = Signature(
            name=name,
            inputs=tuple([ref.spec for ref in inputs]),
            outputs=tuple([ref.spec for ref in outputs]),
            scalars=tuple(scalars),
            groups=tuple(groups),
            overload=overload,
        )
        return self.target.add_op(
            signature,
            [ref.tensor for ref in inputs],
            [ref.tensor for ref in outputs],
            module=module,
            forward=forward,
            stream=stream or self.stream,
        )

    def compute(
        self, name: str, arguments: Arguments, shape: Sequence[int], scalars: Scalars = (), *,
        dtype: str = "float32", overload: str = "", module: str = "", forward: int = -1,
    ) -> Ref:  # fmt: skip
        """What an op allocates and gives: one tensor of this shape."""
        result = self.add_tensor(shape, dtype)
        self.add_op(name, arguments, [result], scalars, overload=overload, module=module, forward=forward)
        return result

    def open_engine_scope(self, name: str, phase: Phase) -> None:
        """Opens a top-level op on autograd's thread, which is in it already, whatever its phase."""
        self.target.open_scope(name, phase, thread=self.engine_thread)
        self.labels.append(self._label)

    def open_engine_op_scope(self, name: str) -> None:
        """Opens a top-level op for what the engine runs after a node, where that is one of its own."""
        if self.engine_ops_apart:
            self.open_scope(name)

    def add_reshape(self, source: Ref, result: Ref, *, module: str, forward: int) -> None:
        """The op by which autograd undoes a view: a view again, without a copy."""
        scalars: Scalars = [("size", result.shape), ("stride", result.spec.stride)]
        self.add_op("aten::_reshape_alias", [("self", source)], [result], scalars, module=module, forward=forward)

    def add_slice(
        self, source: Ref, dim: int, start: int, end: int, *, module: str, forward: int = -1
    ) -> tuple[Ref, int]:  # fmt: skip
        """A view of `start` to `end` along one dimension, and its op."""
        part = self.add_view(source, [end - start if i == dim else n for i, n in enumerate(source.shape)],
                         source.spec.stride)  # fmt: skip
        scalars: Scalars = [("dim", dim), ("start", start), ("end", end), ("step", 1)]
        op = self.add_op(
            "aten::slice", [("self", source)], [part], scalars, overload="Tensor", module=module, forward=forward
        )
        return part, op

    def add_column_slices(self, source: Ref, widths: Sequence[int], *, module: str, forward: int = -1) -> list[Ref]:
        """Views of this many columns each, side by side."""
        return self.add_slices(source, 1, widths, module=module, forward=forward)

    def add_slices(self, source: Ref, dim: int, widths: Sequence[int], *, module: str, forward: int = -1) -> list[Ref]:
        """Views of this many rows or columns each along a dimension: the way back of a concatenation."""
        parts, start = [], 0
        for width in widths:
            parts.append(self.add_slice(source, dim, start, start + width, module=module, forward=forward)[0])
            start += width
        return parts

    def add_device_copy(
        self, source: Ref, device: str = "cuda", *, non_blocking: bool = False, module: str = ""
    ) -> Ref:
        """A copy on another device, made in the open scope."""
        copied = self.add_tensor(source.shape, source.spec.dtype, device)
        scalars: Scalars = [("dtype", None), ("non_blocking", non_blocking), ("memory_format", None)]
        self.add_op("aten::_to_copy", [("self", source)], [copied], scalars, module=module)
        return copied

    def add_input_copy(self, shape: tuple[int, ...], dtype: str, *, non_blocking: bool = False) -> Ref:
        """An input copied from pinned host memory, in a scope of its own."""
        host = self.add_resident_tensor(shape, StorageKind.INPUT, dtype, "cpu:pinned")
        self.open_scope("aten::to", Phase.INPUT)
        return self.add_device_copy(host, non_blocking=non_blocking)

    def add_cast(self, source: Ref, dtype: str, *, module: str = "", forward: int = -1) -> tuple[Ref, int]:
        """The tensor in another type, and the op that makes it in the open scope."""
        spec = source.spec
        dense = spec.numel == 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
        result = self.add_tensor(source.shape, dtype, stride=spec.stride if dense else None)
        scalars: Scalars = [("dtype", dtype), ("non_blocking", False), ("memory_format", None)]
        return result, self.add_op(
            "aten::_to_copy", [("self", source)], [result], scalars, module=module, forward=forward
        )

    def add_autocast(self, operand: Ref, module: str) -> tuple[Ref, int]:
        """An operand of a GEMM, and the op that cast it (-1: none)."""
        if not self.half or operand.spec.dtype != "float32":
            return operand, -1
        return self.add_cast(operand, self.half, module=module)

    def add_cast_backward(self, grad: Ref, forward: int, *, dtype: str = "float32", module: str = "") -> Ref:
        """The gradient of what the op `forward` cast, from that of its result; the same when it is -1."""
        if forward < 0:
            return grad
        self.open_scope("ToCopyBackward0", Phase.BACKWARD)
        result, _ = self.add_cast(grad, dtype, module=module, forward=forward)
        self.free_tensors(grad)
        return result

    def record_event(self, stream: int, *, module: str = "") -> int:
        """Records an event on a stream and gives its number."""
        stream = stream or self.stream
        event = self._events
        self._events += 1
        scalars = [("event", event), ("stream", stream)]
        self.add_op("cuda::event_record", [], [], scalars, module=module, stream=stream)
        return event

    def wait_for_event(self, event: int, stream: int = 0, *, module: str = "") -> None:
        """Lets a stream wait for an event."""
        stream = stream or self.stream
        scalars = [("event", event), ("stream", stream)]
        self.add_op("cuda::stream_wait_event", [], [], scalars, module=module, stream=stream)

    def add_collective(
        self,
        name: str,
        kind: str,
        group: Communicator,
        arguments: Arguments,
        output: Ref,
        *,
        nbytes: int,
        details: Scalars = (),
        module: str = "",
        forward: int = -1,
        stream: int = 0,
    ) -> int:
        """A collective as ProcessGroupNCCL runs it: on its communicator's stream, after what `stream` has so far;
        gives the event of its end, which whoever uses the result waits for. `name` is an op of c10d, or has a namespace
        of its own; `details` are its further scalars."""
        runs_on = self.stream_of(group)
        around = "" if forward >= 0 else module
        self.wait_for_event(self.record_event(stream, module=around), runs_on, module=around)
        scalars: Scalars = [
            ("collective", kind), ("group", group.ranks), ("communicator", group.number), ("bytes", nbytes),
            *details, ("async_op", True),
        ]  # fmt: skip
        full = name if "::" in name else f"c10d::{name}"
        self.add_op(full, arguments, [output], scalars, module=module, forward=forward, stream=runs_on)
        return self.record_event(runs_on, module=around)

    def add_all_reduce(self, group: Communicator, flat: Ref, *, stream: int = 0) -> int:
        """An all-reduce in place; gives the event of its end."""
        arguments = [("tensors", flat)]
        return self.add_collective(
            "allreduce_", "all_reduce", group, arguments, flat, nbytes=flat.spec.nbytes, stream=stream
        )

    @contextmanager
    def use_stream(self, stream: int) -> Iterator[None]:
        """What names no other stream runs on this one."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def free_tensors(self, *refs: Ref) -> None:
        """Releases storages after the last op so far."""
        for ref in refs:
            self.target.free_storage(ref.storage)

    def build_program(self) -> Program:
        """The program written so far."""
        return self.target.build_program()


class RankBuilder(StepBuilder):
    """Writes the step of one of many ranks: with its process groups, its all-to-alls, and inputs that the training loop
    holds to the end. With `like`, a program of a rank that runs the same ops, only sizes are taken."""

    def __init__(
        self, batch_size: int, rank: int, world_size: int, gpus_per_node: int, like: Program | None = None
    ) -> None:
        target = ProgramBuilder(batch_size=batch_size, by_place=True) if like is None else SizesBuilder(like)
        super().__init__(batch_size, target=target)
        self.rank, self.world_size = rank, world_size
        self.world = Communicator(0, tuple(range(world_size)))
        node, local = divmod(rank, gpus_per_node)
        nodes = -(-world_size // gpus_per_node)
        mates = range(node * gpus_per_node, min((node + 1) * gpus_per_node, world_size))
        peers = range(local, world_size, gpus_per_node)
        # as `new_group` numbers them: one group per node, then one of equal places in all nodes
        self.within = Communicator(1 + node, tuple(mates))
        self.across = Communicator(1 + nodes + local, tuple(peers))
        self._held: set[int] = set()

    def add_all_to_all(
        self, group: Communicator, source: Ref, output: Ref, send: Sequence[int], receive: Sequence[int],
        *, module: str = "", forward: int = -1, stream: int = 0,
    ) -> int:  # fmt: skip
        """An all-to-all of flat tensors; `send` and `receive` count the elements to and from each rank."""
        item = source.spec.itemsize
        sent, received = tuple(item * n for n in send), tuple(item * n for n in receive)
        even = len({*sent, *received}) == 1
        splits: Scalars = () if even else (("send_splits", sent), ("recv_splits", received))
        return self.add_collective(
            "alltoall_base_", "all_to_all" if even else "all_to_all_v", group, [("output", output), ("input", source)],
            output, nbytes=sum(sent), details=splits, module=module, forward=forward, stream=stream,
        )  # fmt: skip

    def add_input_copy(self, shape: tuple[int, ...], dtype: str, *, non_blocking: bool = True) -> Ref:
        """An input copied from pinned host memory, without waiting for it. The training loop holds it to the end."""
        copied = super().add_input_copy(shape, dtype, non_blocking=non_blocking)
        self._held.add(copied.storage)
        return copied

    def free_tensors(self, *refs: Ref) -> None:
        """Releases storages after the last op so far, but not what the training loop holds."""
        super().free_tensors(*(ref for ref in refs if ref.storage not in self._held))


def _find_stream(program: Program, communicator: int) -> int:
    """The stream that the program runs this communicator on, or the next free one."""
    c = program.columns
    for index, signature in enumerate(program.signatures):
        if signature.scalar("communicator") == communicator:
            return int(c.op_stream[c.op_signature == index][0])
    return 1 + int(c.op_stream.max(initial=0))

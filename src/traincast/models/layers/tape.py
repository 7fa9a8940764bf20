"""Writing a program by hand the way a capture would: tensors with forms and storages, ops with named arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from traincast.ir.builder import ProgramBuilder
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


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
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


class Tape:
    """A `ProgramBuilder` that makes tensors from shapes and fills in signatures.

    Backward scopes are on thread 1; changes of thread are tied together as autograd's are. `half` is the type that
    autocast turns operands of matrix products into ("" without autocast). `engine_ops_apart`: what the autograd engine
    runs after a node (sums of gradients) are host ops of their own, as PyTorch 1.8's profiler shows them.
    Each communicator has a stream of its own, numbered from 1 in order of first use.
    """

    half: str = ""
    engine_ops_apart: bool = False
    engine_thread: int = 1
    stream: int = 0  # on which ops run that name no other

    def __init__(self, batch_size: int, *, builder: ProgramBuilder | None = None) -> None:
        self.builder = ProgramBuilder(batch_size=batch_size) if builder is None else builder
        self._thread = 0
        self._phase = Phase.FORWARD
        self._streams: dict[int, int] = {}
        self._events = 0

    def _tensor(self, storage: int, shape: Sequence[int], stride: Sequence[int], dtype: str, device: str) -> Ref:
        spec = TensorSpec(tuple(shape), tuple(stride), dtype, device)
        return Ref(self.builder.tensor(storage), storage, spec)

    def _storage(self, shape: Sequence[int], dtype: str, device: str, kind: StorageKind, *, before: bool) -> int:
        elements = 1
        for size in shape:
            elements *= size
        # host memory takes no device bytes
        nbytes = elements * DTYPE_BYTES[dtype] if device == "cuda" else 0
        return self.builder.storage(nbytes, kind, before_step=before)

    def resident(self, shape: Sequence[int], kind: StorageKind, dtype: str = "float32", device: str = "cuda") -> Ref:
        """A tensor that is there before the step."""
        storage = self._storage(shape, dtype, device, kind, before=True)
        return self._tensor(storage, shape, contiguous(shape), dtype, device)

    def new(
        self, shape: Sequence[int], dtype: str = "float32", device: str = "cuda", stride: Sequence[int] | None = None
    ) -> Ref:
        """A tensor that the next op allocates."""
        storage = self._storage(shape, dtype, device, StorageKind.ACTIVATION, before=False)
        return self._tensor(storage, shape, contiguous(shape) if stride is None else stride, dtype, device)

    def view(self, of: Ref, shape: Sequence[int], stride: Sequence[int] | None = None) -> Ref:
        """Another tensor on the same storage."""
        strides = contiguous(shape) if stride is None else stride
        return self._tensor(of.storage, shape, strides, of.spec.dtype, of.spec.device)

    def seen_as(self, of: Ref, shape: Sequence[int], stride: Sequence[int], dtype: str) -> Ref:
        """The same storage seen as another type: a stand-in for a copy that is not counted as memory."""
        return self._tensor(of.storage, shape, stride, dtype, of.spec.device)

    def scope(self, name: str, phase: Phase | None = None) -> None:
        """Opens a top-level host op; without a phase it stays in the one before. Backward runs on its own thread."""
        self._phase = self._phase if phase is None else phase
        thread = int(self._phase == Phase.BACKWARD and not name.startswith("aten::ones_like"))
        after = self.builder.num_scopes - 1 if thread != self._thread else -1
        self._thread = thread
        self.builder.scope(name, self._phase, thread=thread, after=after)

    def op(
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
        return self.builder.op(
            signature,
            [ref.tensor for ref in inputs],
            [ref.tensor for ref in outputs],
            module=module,
            forward=forward,
            stream=stream or self.stream,
        )

    def engine_scope(self, name: str, phase: Phase) -> None:
        """Opens a top-level op on autograd's thread, which is in it already, whatever its phase."""
        self.builder.scope(name, phase, thread=self.engine_thread)

    def engine_op_scope(self, name: str) -> None:
        """Opens a top-level op for what the engine runs after a node, where that is one of its own."""
        if self.engine_ops_apart:
            self.scope(name)

    def reshaped(self, source: Ref, result: Ref, *, module: str, forward: int) -> None:
        """The op by which autograd undoes a view: a view again, without a copy."""
        scalars: Scalars = [("size", result.shape), ("stride", result.spec.stride)]
        self.op("aten::_reshape_alias", [("self", source)], [result], scalars, module=module, forward=forward)

    def slice(
        self, source: Ref, dim: int, start: int, end: int, *, module: str, forward: int = -1
    ) -> tuple[Ref, int]:  # fmt: skip
        """A view of `start` to `end` along one dimension, and its op."""
        part = self.view(source, [end - start if i == dim else n for i, n in enumerate(source.shape)],
                         source.spec.stride)  # fmt: skip
        scalars: Scalars = [("dim", dim), ("start", start), ("end", end), ("step", 1)]
        op = self.op(
            "aten::slice", [("self", source)], [part], scalars, overload="Tensor", module=module, forward=forward
        )
        return part, op

    def slices(self, source: Ref, widths: Sequence[int], *, module: str, forward: int = -1) -> list[Ref]:
        """Views of so many columns each, side by side along dimension 1: the way back of a concatenation."""
        parts, start = [], 0
        for width in widths:
            parts.append(self.slice(source, 1, start, start + width, module=module, forward=forward)[0])
            start += width
        return parts

    def moved(self, source: Ref, device: str = "cuda", *, non_blocking: bool = False, module: str = "") -> Ref:
        """A copy on another device, made in the open scope."""
        copied = self.new(source.shape, source.spec.dtype, device)
        scalars: Scalars = [("dtype", None), ("non_blocking", non_blocking), ("memory_format", None)]
        self.op("aten::_to_copy", [("self", source)], [copied], scalars, module=module)
        return copied

    def copied_in(self, shape: tuple[int, ...], dtype: str, *, non_blocking: bool = False) -> Ref:
        """An input copied from pinned host memory, in a scope of its own."""
        host = self.resident(shape, StorageKind.INPUT, dtype, "cpu:pinned")
        self.scope("aten::to", Phase.INPUT)
        return self.moved(host, non_blocking=non_blocking)

    def cast(self, source: Ref, dtype: str, *, module: str = "", forward: int = -1) -> tuple[Ref, int]:
        """The tensor in another type, and the op that makes it in the open scope."""
        spec = source.spec
        dense = spec.numel == 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
        result = self.new(source.shape, dtype, stride=spec.stride if dense else None)
        scalars: Scalars = [("dtype", dtype), ("non_blocking", False), ("memory_format", None)]
        return result, self.op("aten::_to_copy", [("self", source)], [result], scalars, module=module, forward=forward)

    def autocast(self, operand: Ref, module: str) -> tuple[Ref, int]:
        """An operand of a matrix product, and the op that cast it (-1: none)."""
        if not self.half or operand.spec.dtype != "float32":
            return operand, -1
        return self.cast(operand, self.half, module=module)

    def cast_backward(self, grad: Ref, forward: int, *, dtype: str = "float32", module: str = "") -> Ref:
        """The gradient of what the op `forward` cast, from that of its result; the same when it is -1."""
        if forward < 0:
            return grad
        self.scope("ToCopyBackward0", Phase.BACKWARD)
        result, _ = self.cast(grad, dtype, module=module, forward=forward)
        self.free(grad)
        return result

    def record(self, stream: int, *, module: str = "") -> int:
        """Records an event on a stream and gives its number."""
        stream = stream or self.stream
        event = self._events
        self._events += 1
        scalars = [("event", event), ("stream", stream)]
        self.op("cuda::event_record", [], [], scalars, module=module, stream=stream)
        return event

    def wait(self, event: int, stream: int = 0, *, module: str = "") -> None:
        """Lets a stream wait for an event."""
        stream = stream or self.stream
        scalars = [("event", event), ("stream", stream)]
        self.op("cuda::stream_wait_event", [], [], scalars, module=module, stream=stream)

    def collective(
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
        runs_on = self._streams.setdefault(group.number, len(self._streams) + 1)
        around = "" if forward >= 0 else module
        self.wait(self.record(stream, module=around), runs_on, module=around)
        scalars: Scalars = [
            ("collective", kind), ("group", group.ranks), ("communicator", group.number), ("bytes", nbytes),
            *details, ("async_op", True),
        ]  # fmt: skip
        full = name if "::" in name else f"c10d::{name}"
        self.op(full, arguments, [output], scalars, module=module, forward=forward, stream=runs_on)
        return self.record(runs_on, module=around)

    def all_reduce(self, group: Communicator, flat: Ref, *, stream: int = 0) -> int:
        """An all-reduce in place; gives the event of its end."""
        arguments = [("tensors", flat)]
        return self.collective(
            "allreduce_", "all_reduce", group, arguments, flat, nbytes=flat.spec.nbytes, stream=stream
        )

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """What names no other stream runs on this one."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def free(self, *refs: Ref) -> None:
        """Releases storages after the last op so far."""
        for ref in refs:
            self.builder.free(ref.storage)

    def build(self) -> Program:
        """The program written so far."""
        return self.builder.build()

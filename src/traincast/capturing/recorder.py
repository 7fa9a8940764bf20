"""The dispatch mode that runs a step on meta tensors and writes down every op that reaches a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.utils._python_dispatch import TorchDispatchMode

from traincast.capturing.arguments import (
    Arguments,
    bind_arguments,
    get_traits,
    group_tensors,
    list_scalars,
    list_tensors,
)
from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.collectives import Collective, list_written_tensors
from traincast.capturing.errors import OTHER_PROCESSES, find_user_line
from traincast.capturing.execution import Execution
from traincast.capturing.kernels import LOGITS_NODE, WRITTEN_IN_LOGITS, WRITTEN_IN_PLACE, take_over
from traincast.capturing.regions import Regions
from traincast.capturing.storages import StorageBook, list_strided_parts
from traincast.capturing.updates import UpdateWatch
from traincast.capturing.values import Values
from traincast.ir.collectives import NAMESPACES
from traincast.ir.ops import Phase, Signature, TensorSpec
from traincast.utils.errors import TraincastError

OP_MARK = "traincast.op:"
CONTROL_MARK = "traincast.control:"
UNRECORDED = "traincast.unrecorded"  # around what is no part of the step
_STAND_IN = ("traincast_fbgemm::", "traincast_zoo_fbgemm::")  # FBGEMM may be loaded alongside them
_SILENT = ("profiler", "prim")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_broadcast: Any = torch.broadcast_shapes
_ADD, _CLONE = torch.ops.aten.add.Tensor, torch.ops.aten.clone.default


@dataclass(frozen=True, slots=True)
class RawOp:
    """An op as it was seen; indices count everything seen, including what `assemble` leaves out.

    A collective runs on another `stream` than the one it was `issued` from.
    """

    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase
    module: str
    forward: int
    stream: int
    issued: int
    reuses_first: bool = False  # a sum that the autograd engine may write into its first input


class Clock(Protocol):
    """What times the host between ops: `host_work.HostClock`."""

    def enter(self) -> None:
        """A call of PyTorch begins."""

    def leave(self) -> None:
        """A call of PyTorch has ended."""

    def add_loading(self, seconds: float) -> None:
        """A data loader has made a batch."""


class OtherRanks(Protocol):
    """What runs the ops that need other ranks: `communication.Communication`, where a step has any."""

    def run_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one op of the communication namespaces; while recording, also records it."""

    def wait_before_use(self, tensors: list[torch.Tensor]) -> None:
        """Waits for what other ranks still owe these tensors."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs ops on meta tensors; while `book.recording`, also records them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper would hide who called

    def __init__(self, regions: Regions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.book = StorageBook()
        self.execution = Execution(self.book, Values(self.book))
        self.regions = regions
        self.ops: list[RawOp] = []
        self.elsewhere: list[int] = []  # ops of other threads, which the profiler does not see
        self.watch = regions.watch = UpdateWatch(self.book)
        self._lock = threading.RLock()  # threads of the script run one op at a time
        self._thread = threading.get_ident()
        self.clock: Clock | None = None  # of the host's work, while a step is recorded
        self.communication: OtherRanks | None = None
        self._forward_of: dict[int, int] = {}
        self._made_on: dict[int, int] = {}  # storage -> stream of the backward op that wrote it
        regions.on_backward_end = self._join_streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one op."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor) first calls ops on what it wraps
        return self.dispatch_op(func, args, kwargs or {})

    def dispatch_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one op; while `book.recording`, also records it."""
        namespace = get_traits(func).namespace
        if namespace in _SILENT:
            return func(*args, **kwargs)
        with self._lock:
            clock = self.clock if threading.get_ident() == self._thread else None
            if clock is not None:
                clock.enter()
            try:
                return self._dispatch_op(func, args, kwargs, namespace)
            finally:
                if clock is not None:
                    clock.leave()

    def _dispatch_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], namespace: str) -> Any:
        with torch._C.DisableTorchFunction():
            if self.watch.watching and not self.book.paused and threading.get_ident() == self._thread:
                self.watch.note_op(func, args, kwargs)
            if namespace in NAMESPACES:
                return self._get_communication(func).run_op(func, args, kwargs)
            if func in WRITTEN_IN_PLACE and self._is_in_backward_formula():
                func = WRITTEN_IN_PLACE[func]
            elif func in WRITTEN_IN_LOGITS and self._is_in_node(LOGITS_NODE) and _fits_in_place(args[0], args[1]):
                func = WRITTEN_IN_LOGITS[func]
            elif func is _CLONE and args[0].layout is torch.sparse_coo and self._is_in_backward_formula():
                func, args, kwargs = take_over(args[0])
            if get_traits(func).composite or (
                torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(_COMPOSITE)
            ):
                with self:  # else autograd's kernels have taken them apart: not those of tensors of inference mode
                    return func.decompose(*args, **kwargs)
            if not self.book.recording:
                return self.execution.run_op(func, args, kwargs)[0]
            return self._record_op(func, args, kwargs)

    def start_recording(self) -> None:
        """Begins recording, perhaps anew."""
        self.ops, self.elsewhere = [], []
        self._forward_of.clear()
        self._made_on.clear()
        self.book.start_recording()

    def record_synchronisation(self, name: str, **scalars: int) -> None:
        """Records a synchronisation of the `cuda::` namespace."""
        if not self.book.recording:
            return
        signature = Signature(name=name, inputs=(), outputs=(), scalars=tuple(scalars.items()))
        with _RecordFunctionFast(name), _RecordFunctionFast(f"{CONTROL_MARK}{len(self.ops)}"):
            phase, stream = self.regions.find_phase(Phase.OTHER), scalars.get("stream", self.regions.stream)
            self._append_op(RawOp(signature, (), (), phase, self.regions.module, -1, stream, stream))

    def get_current_stream(self) -> int:
        """The stream that ops are issued to now: in backward that of the forward op."""
        return self._find_issue_stream(self._forward_of_node())

    def _find_issue_stream(self, forward: int) -> int:
        """Backward runs on the stream of its forward op, unless a hook has chosen another."""
        if self.regions.hook_stream is not None:
            return self.regions.hook_stream
        return self.ops[forward].issued if forward >= 0 else self.regions.stream

    def record_collective(
        self, func: Any, arguments: Arguments, what: Collective, stream: int, execute: Callable[[], Any]
    ) -> Any:
        """Runs and records a collective on a stream of its own; a barrier has no tensor."""
        barrier = what.kind == "barrier"
        groups, tensors = ((), []) if barrier else group_tensors(arguments)
        specs, ids = self._describe_tensors(tensors)
        forward = self._forward_op()
        issued = self._find_issue_stream(forward)
        with _RecordFunctionFast(f"{OP_MARK}{len(self.ops)}"):
            pass
        result = execute()
        made = [] if barrier else list_written_tensors(arguments) or result
        out_specs, out_ids = self._describe_outputs(made, tensors, "cuda")
        signature = Signature(
            name=func._schema.name, inputs=specs, outputs=out_specs, scalars=what.list_scalars(), groups=groups
        )
        phase = self.regions.find_phase(Phase.FORWARD)
        module = self.ops[forward].module if forward >= 0 else self.regions.module
        self._append_op(RawOp(signature, ids, out_ids, phase, module, forward, stream, issued))
        return result

    def _get_communication(self, func: Any) -> OtherRanks:
        if self.communication is None:
            raise TraincastError(f"{find_user_line()}: {func} {OTHER_PROCESSES}")
        return self.communication

    def _record_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = get_traits(func)
        arguments = bind_arguments(func, args, kwargs)
        groups, tensors = group_tensors(arguments)
        if self.communication is not None and not known.view:
            self.communication.wait_before_use(tensors)
        specs, ids = self._describe_tensors(tensors)
        forward = self._forward_op()
        stream = self._find_stream(forward, ids)
        if threading.get_ident() != self._thread:
            self.elsewhere.append(len(self.ops))
        with _RecordFunctionFast(f"{OP_MARK}{len(self.ops)}"):
            pass
        reuses = func is _ADD and self._is_in_backward_formula() and _is_sole_owner(tensors[0])
        result, device = self.execution.run_op(func, args, kwargs)
        out_specs, out_ids = self._describe_outputs(result, tensors, device)
        full_name = get_original_name(known.name)
        name = full_name.partition("::")[2]
        signature = Signature(
            name=full_name,
            inputs=specs,
            outputs=out_specs,
            scalars=list_scalars(arguments),
            groups=groups,
            overload=known.overload,
        )
        copied = bool(specs) and specs[0].device != "cuda" and bool(out_specs) and out_specs[0].device == "cuda"
        phase = self.regions.find_phase(Phase.INPUT if copied and "copy" in name else Phase.FORWARD)
        module = self.ops[forward].module if forward >= 0 else self.regions.module
        self._append_op(RawOp(signature, ids, out_ids, phase, module, forward, stream, stream, reuses))
        if forward < 0 and not known.view:
            get_assumptions().note_place(module, sum(spec.nbytes for spec in out_specs))
        if phase == Phase.BACKWARD and self.regions.hook_stream is None:
            self._made_on.update((self.book.tensor_storage[t], stream) for t in out_ids)
        return result

    def _append_op(self, op: RawOp) -> None:
        self.ops.append(op)
        self.book.num_ops = len(self.ops)

    def _find_stream(self, forward: int, inputs: tuple[int, ...]) -> int:
        """Where an op runs; the engine lets backward wait for gradients made on other streams."""
        stream = self._find_issue_stream(forward)
        if self.regions.hook_stream is not None:
            return stream  # hooks order their streams themselves
        for tensor in inputs:
            made = self._made_on.get(self.book.tensor_storage[tensor], stream)
            if made != stream:
                self._wait_for_stream(stream, made)
        return stream

    def _wait_for_stream(self, waits: int, for_stream: int) -> None:
        event = self.regions.make_event_number()
        self.record_synchronisation("cuda::event_record", event=event, stream=for_stream)
        self.record_synchronisation("cuda::stream_wait_event", event=event, stream=waits)
        self._made_on = {s: waits if on == for_stream else on for s, on in self._made_on.items()}

    def _join_streams(self) -> None:
        """At the end of backward the engine lets the caller's stream wait for all others it used."""
        for used in sorted(set(self._made_on.values()) - {self.regions.stream}):
            self._wait_for_stream(self.regions.stream, used)
        self._made_on.clear()

    def _describe_tensors(self, tensors: list[torch.Tensor]) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
        specs, ids = [], []
        for whole in tensors:
            for part in list_strided_parts(whole):
                info = self.book.get_info(part)
                specs.append(self.book.get_spec(part, info.device))
                ids.append(self.book.get_tensor_id(part, info, new=False))
        return tuple(specs), tuple(ids)

    def _describe_outputs(
        self, result: Any, inputs: list[torch.Tensor], device: str
    ) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
        input_ids = {id(tensor) for tensor in inputs}
        specs, ids = [], []
        for whole in list_tensors(result):
            for part in list_strided_parts(whole):
                info = self.book.get_info(part, device=device, produced=True)
                specs.append(self.book.get_spec(part, info.device))
                ids.append(self.book.get_tensor_id(part, info, new=id(whole) not in input_ids))
        return tuple(specs), tuple(ids)

    def _forward_op(self) -> int:
        """In backward, the op whose gradient is being computed; in forward, notes this op under its node's number."""
        if torch._C._current_autograd_node() is None:
            self._forward_of.setdefault(torch._C._autograd._get_sequence_nr() - 1, len(self.ops))
        return self._forward_of_node()

    def _forward_of_node(self) -> int:
        node = torch._C._current_autograd_node()
        return -1 if node is None else self._forward_of.get(node._sequence_nr(), -1)

    def _is_in_node(self, name: str) -> bool:
        node = torch._C._current_autograd_node()
        return node is not None and node.name() == name

    def _is_in_backward_formula(self) -> bool:
        """Whether PyTorch's own backward code is running, and no Python code of a hook or custom function."""
        return torch._C._current_autograd_node() is not None and self.regions.is_called_by_engine()


def _fits_in_place(target: torch.Tensor, other: Any) -> bool:
    """Whether a result of two tensors fits into the first; a weight of one class is smaller than what it weighs."""
    return not isinstance(other, torch.Tensor) or _broadcast(target.shape, other.shape) == target.shape


def get_original_name(name: str) -> str:
    """The name of an op that a stub of ours stands for; any other name as it is."""
    return f"fbgemm::{name.partition('::')[2]}" if name.startswith(_STAND_IN) else name


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    """The engine's test for summing two gradients in place: dense memory, and no other holder of it.

    Seen from here the tensor has four holders (the engine, the call, its Python object, ours) and its storage two.
    """
    if tensor.layout is not torch.strided or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return False
    storage = tensor.untyped_storage()
    holders: int = tensor._use_count()  # type: ignore[attr-defined]
    return holders <= 4 and torch._C._storage_Use_Count(storage._cdata) <= 2

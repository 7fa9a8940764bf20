"""Collectives as ProcessGroupNCCL runs them: on streams of their own, tied to the others by events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import TensorWeakRef

from traincast.capturing.arguments import Arguments, bind_arguments
from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.collectives import Collective, describe_collective, list_written_tensors
from traincast.capturing.errors import find_user_line
from traincast.capturing.messages import ObjectMessages
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder
from traincast.capturing.storages import list_strided_parts
from traincast.capturing.value_communication import communicate_values
from traincast.ir.collectives import COLLECTIVES, Route
from traincast.utils.errors import TraincastError

_AGREED = 64  # elements of a message whose values are passed on
_functional = torch.ops._c10d_functional
_ASYNC_RESULT = "_c10d_functional::_wrap_tensor_autograd"  # registered only when functional collectives are used
_WAIT = _functional.wait_tensor.default
# The functional forms copy their input and then work in place.
_COPY_FIRST = {
    _functional.all_reduce.default: _functional.all_reduce_.default,
    _functional.all_reduce_coalesced.default: _functional.all_reduce_coalesced_.default,
    _functional.broadcast.default: _functional.broadcast_.default,
}


@dataclass(slots=True, eq=False)
class Issued:
    """A work with its collective and event. NCCL's works hold what they read and write until somebody waits (`held`);
    who asks for their future gets what was `made`, if it is still there."""

    work: Any
    collective: Collective
    event: int | None
    made: list[TensorWeakRef]
    held: list[torch.Tensor]


class Future:
    """What a work or a callback will give: on the host it is there at once, on the device after `event`."""

    def __init__(self, communication: Communication, value: Any, event: int | None) -> None:
        self._communication, self._value, self._event = communication, value, event

    def value(self) -> Any:
        """The tensors, as a future of NCCL gives them."""
        return self._value

    def wait(self) -> Any:
        """Makes the current stream wait."""
        self._communication.wait_event(self._event)
        return self._value

    def done(self) -> bool:
        """Always: nothing runs here."""
        return True

    def then(self, callback: Any) -> Future:
        """Runs the callback now, on a stream that waits for what came before."""
        return self._communication.run_after(self, self._event, callback)

    def add_done_callback(self, callback: Any) -> None:
        """As `then`, without a result."""
        self.then(callback)


@dataclass(slots=True, eq=False)
class Communication:
    """Places collectives on streams: one per process group, and one per pair of ranks that send to each other."""

    recorder: Recorder
    messages: ObjectMessages
    batched: bool = False  # inside `batch_isend_irecv`
    backend: str = ""  # that the script has asked for
    _streams: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _works: dict[int, Issued] = field(default_factory=dict)  # by id
    _last: Issued | None = None
    _reduction: Any = None  # of the call of PyTorch's module that is running
    _callbacks: int | None = None  # stream of what runs after futures
    _unawaited: dict[int, int] = field(default_factory=dict)  # storage of a functional result -> event

    def run_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one op of the communication namespaces; while recording, also records it."""
        if func._schema.name == _ASYNC_RESULT:
            return args[0]
        if func is _WAIT:
            self.wait_before_use([args[0]])
            return args[0]
        if func in _COPY_FIRST:
            return self._copy_first(func, args)
        arguments = bind_arguments(func, args, kwargs)
        collective = describe_collective(func._schema.name.partition("::")[2], arguments)
        stream = self._find_stream(collective)
        tensors = _list_argument_tensors(arguments)
        recording = self.recorder.book.recording
        on_host = self._is_on_host(collective, tensors) if recording else not any(t.is_meta for t in tensors)
        if not recording or on_host:
            result = self._execute_op(func, args, kwargs)
            self._communicate_values(func, collective, arguments, result)
            self._remember_work(func, result, collective, None, arguments, on_host=on_host)
            return result
        self.wait_before_use(tensors)
        issued = self.recorder.get_current_stream()
        self._order_streams(before=issued, after=stream)
        result = self.recorder.record_collective(
            func, arguments, collective, stream, lambda: self._execute_op(func, args, kwargs)
        )
        self._communicate_values(func, collective, arguments, result)
        event = self.recorder.regions.make_event_number()
        self.recorder.record_synchronisation("cuda::event_record", event=event, stream=stream)
        self._remember_work(func, result, collective, event, arguments, on_host=False)
        return result

    def _communicate_values(self, func: Any, collective: Collective, arguments: Arguments, result: Any) -> None:
        if COLLECTIVES[collective.kind].route is Route.PAIR:
            self._send_message(func, collective, arguments)
            return
        outputs = list_written_tensors(arguments) if func.namespace == "c10d" else _list_tensors(result)
        values, numbers = self.recorder.execution.values, self.messages.numbers
        communicate_values(values, numbers, collective, arguments, outputs, self._reduction)

    def _send_message(self, func: Any, collective: Collective, arguments: Arguments) -> None:
        """Small integers that ranks send each other before the step that is recorded: stages of a pipeline agree
        on how they start."""
        tensors = _list_argument_tensors(arguments)
        small = [t for t in tensors if not t.dtype.is_floating_point and t.numel() <= _AGREED]
        values, ends = self.recorder.execution.values, dict(collective.ends)
        if self.recorder.book.recording or len(small) != len(tensors):
            return
        name = self.messages.make_message_key(collective.group, ends["source"], ends["target"])
        if func._schema.name.endswith("::send"):
            known = [values.get_values(t) for t in tensors]
            self.messages.post_object(name, [None if k is None else k.clone() for k in known])
        else:
            for tensor, value in zip(tensors, self.messages.take_object(name), strict=False):
                values.replace_values(tensor, value)

    def wait_before_use(self, tensors: list[torch.Tensor]) -> None:
        """Waits for functional collectives whose results are among these tensors."""
        if not self._unawaited:
            return
        storages = {self.recorder.book.get_info(p).index: None for t in tensors for p in list_strided_parts(t)}
        for storage in storages:
            event = self._unawaited.pop(storage, None)
            if event is not None:
                stream = self.recorder.get_current_stream()
                self.recorder.record_synchronisation("cuda::stream_wait_event", event=event, stream=stream)

    def wait_for_work(self, work: Any) -> bool:
        """`work.wait()`: the current stream waits for the collective; a barrier makes the host wait too."""
        # A work that no op made ends a group of coalesced calls: the last of them is behind all others.
        known = self._works.get(id(work), self._last)
        if known is not None and known.event is not None and self.recorder.book.recording:
            stream = self.recorder.get_current_stream()
            self.wait_event(known.event)
            if known.collective.kind == "barrier":
                self.recorder.record_synchronisation("cuda::stream_synchronize", stream=stream)
        for issued in [known] if known is not None and known.work is work else self._works.values():
            issued.held.clear()
        return True

    def wait_event(self, event: int | None) -> None:
        """Makes the current stream wait for an event of the recorded step."""
        if event is not None and self.recorder.book.recording:
            stream = self.recorder.get_current_stream()
            self.recorder.record_synchronisation("cuda::stream_wait_event", event=event, stream=stream)

    def run_after(self, future: Future, event: int | None, callback: Any) -> Future:
        """Runs a callback on the stream of callbacks, after an event; gives the future of its result."""
        regions = self.recorder.regions
        if self._callbacks is None:
            self._callbacks = regions.make_stream_number()
        before = regions.stream, regions.hook_stream
        regions.stream = regions.hook_stream = self._callbacks
        try:
            self.wait_event(event)
            value = callback(future)
            done = regions.make_event_number()
            self.recorder.record_synchronisation("cuda::event_record", event=done, stream=self._callbacks)
        finally:
            regions.stream, regions.hook_stream = before
        return Future(self, value, done if self.recorder.book.recording else None)

    def make_future(self, work: Any) -> Future:
        """`work.get_future()`: done as soon as it is issued; who uses its value waits on the device."""
        known = self._works.get(id(work), self._last)
        if known is None:
            return Future(self, [], None)
        known.held.clear()  # the watchdog gives it back once the collective is done
        alive = [tensor for reference in known.made if (tensor := reference()) is not None]
        return Future(self, alive, known.event)

    def install_patches(self, patches: Patches) -> None:
        """Answers for works, and rejections for what needs values of other ranks, until the patches are undone."""
        c10d: Any = torch._C._distributed_c10d
        results = {
            "wait": lambda work, *timeout: self.wait_for_work(work),
            "synchronize": lambda work: self.wait_for_work(work),
            "block_current_stream": lambda work: self.wait_for_work(work),
        }
        for name, result in results.items():
            patches.set_attribute(c10d.Work, name, result)
        patches.set_attribute(c10d.FakeWork, "wait", results["wait"])
        patches.set_attribute(c10d.Work, "get_future", lambda work: self.make_future(work))
        patches.set_attribute(
            c10d.Work, "get_future_result", _make_rejection("work.get_future_result()", "use work.wait()")
        )

        def batched(operations: list[Any]) -> Any:
            self.batched = True
            try:
                return [operation.op(operation.tensor, **_find_peer(operation)) for operation in operations]
            finally:
                self.batched = False

        patches.set_everywhere(dist, "batch_isend_irecv", batched)

        @patches.wrap(dist, "all_reduce", everywhere=True)
        def reducing(
            all_reduce: Any, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any
        ) -> Any:
            self._reduction = op
            try:
                return all_reduce(tensor, op, *args, **kwargs)
            finally:
                self._reduction = None

    def _is_on_host(self, collective: Collective, tensors: list[torch.Tensor]) -> bool:
        """Whether a collective is gloo's, between hosts: it takes no time here, which is said. NCCL rejects it."""
        on_host = any(self.recorder.book.get_device(tensor).startswith("cpu") for tensor in tensors)
        if not on_host or collective.kind == "barrier":
            return False
        if self.backend == "nccl":
            raise TraincastError(
                f"{find_user_line()}: NCCL has no {collective.kind} of host tensors; put them on cuda, or call "
                "init_process_group with 'cpu:gloo,cuda:nccl'"
            )
        get_assumptions().note_assumption(
            f"{collective.kind} of {collective.bytes} bytes between hosts is taken to cost nothing"
        )
        return True

    def _find_stream(self, collective: Collective) -> int:
        """NCCL's stream of a group, or of a pair; sends and receives of one batch do not wait for each other."""
        ends = dict(collective.ends)
        pair: tuple[Any, ...] = ()
        if COLLECTIVES[collective.kind].route is Route.PAIR:
            pair = (ends["source"], ends["target"])
            pair = ("batch", *pair) if self.batched else tuple(sorted(pair))
        key = (str(collective.group.group_name), *pair)
        if key not in self._streams:
            self._streams[key] = self.recorder.regions.make_stream_number()
        return self._streams[key]

    def _order_streams(self, *, before: int, after: int) -> None:
        event = self.recorder.regions.make_event_number()
        self.recorder.record_synchronisation("cuda::event_record", event=event, stream=before)
        self.recorder.record_synchronisation("cuda::stream_wait_event", event=event, stream=after)

    def _execute_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """PyTorch's own stub for the op. Some have none for meta tensors: they get empty ones."""
        if "coalesced_" in func._schema.name and func.namespace == "c10d":
            args = tuple(_make_empty(value) for value in args)
        return func(*args, **kwargs)

    def _copy_first(self, func: Any, args: tuple[Any, ...]) -> Any:
        def copied(tensor: torch.Tensor) -> torch.Tensor:
            copy: torch.Tensor = self.recorder.dispatch_op(
                torch.ops.aten.clone.default, (tensor,), {"memory_format": torch.contiguous_format}
            )
            return copy

        first = [copied(t) for t in args[0]] if isinstance(args[0], list) else copied(args[0])
        return self.run_op(_COPY_FIRST[func], (first, *args[1:]), {})

    def _remember_work(
        self, func: Any, result: Any, collective: Collective, event: int | None, arguments: Arguments, *, on_host: bool
    ) -> None:
        """What to wait for later; `event` is None for a collective that is not part of the recorded step."""
        if func.namespace == "c10d":
            boxed = result[-1] if isinstance(result, (tuple, list)) else result
            work = dist.Work.unbox(boxed)
            made = list_written_tensors(arguments) if COLLECTIVES[collective.kind].route is not Route.PAIR else []
            outputs = [TensorWeakRef(tensor) for tensor in made]
            held = [] if on_host else _list_argument_tensors(arguments)
            self._last = self._works[id(work)] = Issued(work, collective, event, outputs, held)  # ids stay distinct
        elif event is not None:
            for tensor in _list_tensors(result):
                self._unawaited[self.recorder.book.get_info(tensor).index] = event


def _list_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _list_tensors(item)] if isinstance(value, (list, tuple)) else []


def _list_argument_tensors(arguments: Arguments) -> list[torch.Tensor]:
    return [tensor for _, value in arguments for tensor in _list_tensors(value)]


def _make_empty(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(0)
    return [_make_empty(item) for item in value] if isinstance(value, list) else value


def _find_peer(operation: Any) -> dict[str, Any]:
    to = "dst" if operation.op is dist.isend else "src"
    return {to: operation.peer, "group": operation.group, "tag": operation.tag}


def _make_rejection(what: str, remedy: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TraincastError(f"{find_user_line()}: {what} cannot be captured: there are no other ranks; {remedy}")

    return refuse

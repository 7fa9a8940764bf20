"""Collectives as ProcessGroupNCCL runs them: on streams of their own, tied to the others by events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from traincast.capturing.arguments import bind
from traincast.capturing.collectives import Collective, describe
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder
from traincast.capturing.refusals import user_line
from traincast.capturing.storages import strided_parts
from traincast.errors import TraincastError
from traincast.workload.collectives import COLLECTIVES, Route

_functional = torch.ops._c10d_functional
_ASYNC_RESULT = "_c10d_functional::_wrap_tensor_autograd"  # registered only when functional collectives are used
_WAIT = _functional.wait_tensor.default
# The functional forms copy their input and then work in place.
_COPY_FIRST = {
    _functional.all_reduce.default: _functional.all_reduce_.default,
    _functional.all_reduce_coalesced.default: _functional.all_reduce_coalesced_.default,
    _functional.broadcast.default: _functional.broadcast_.default,
}
_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
            "recv_object_list")  # fmt: skip


@dataclass(slots=True, eq=False)
class Communication:
    """Places collectives on streams: one per process group, and one per pair of ranks that send to each other."""

    recorder: Recorder
    batched: bool = False  # inside `batch_isend_irecv`
    _streams: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _works: dict[int, tuple[Any, Collective, int | None]] = field(default_factory=dict)  # by id: work, what, event
    _last: tuple[Any, Collective, int | None] | None = None
    _unawaited: dict[int, int] = field(default_factory=dict)  # storage of a functional result -> event

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one op of the communication namespaces; while recording, also records it."""
        if func._schema.name == _ASYNC_RESULT:
            return args[0]
        if func is _WAIT:
            self.before_use([args[0]])
            return args[0]
        if func in _COPY_FIRST:
            return self._copy_first(func, args)
        arguments = bind(func, args, kwargs)
        collective = describe(func._schema.name.partition("::")[2], arguments)
        stream = self._stream(collective)
        if not self.recorder.book.recording:
            result = self._execute(func, args, kwargs)
            self._remember(func, result, collective, None)
            return result
        tensors = [t for _, value in arguments for t in _tensors(value)]
        self._refuse_host_tensors(collective, tensors)
        self.before_use(tensors)
        issued = self.recorder.current_stream()
        self._order(before=issued, after=stream)
        result = self.recorder.collective(
            func, arguments, collective, stream, lambda: self._execute(func, args, kwargs)
        )
        event = self.recorder.regions.new_event()
        self.recorder.control("cuda::event_record", event=event, stream=stream)
        self._remember(func, result, collective, event)
        return result

    def before_use(self, tensors: list[torch.Tensor]) -> None:
        """Waits for functional collectives whose results are among these tensors."""
        if not self._unawaited:
            return
        storages = {self.recorder.book.info(p).index: None for t in tensors for p in strided_parts(t)}
        for storage in storages:
            event = self._unawaited.pop(storage, None)
            if event is not None:
                stream = self.recorder.current_stream()
                self.recorder.control("cuda::stream_wait_event", event=event, stream=stream)

    def wait(self, work: Any) -> bool:
        """`work.wait()`: the current stream waits for the collective; a barrier makes the host wait too."""
        # A work that no op made ends a group of coalesced calls: the last of them is behind all others.
        known = self._works.get(id(work), self._last)
        if known is not None and known[2] is not None and self.recorder.book.recording:
            stream = self.recorder.current_stream()
            self.recorder.control("cuda::stream_wait_event", event=known[2], stream=stream)
            if known[1].kind == "barrier":
                self.recorder.control("cuda::stream_synchronize", stream=stream)
        return True

    def install(self, patches: Patches) -> None:
        """Answers for works, and refusals for what needs values of other ranks, until the patches are undone."""
        c10d: Any = torch._C._distributed_c10d
        answers = {"wait": lambda work, *timeout: self.wait(work), "synchronize": lambda work: self.wait(work),
                   "block_current_stream": lambda work: self.wait(work)}  # fmt: skip
        for name, answer in answers.items():
            patches.set(c10d.Work, name, answer)
        patches.set(c10d.FakeWork, "wait", answers["wait"])
        for name in ("get_future", "get_future_result"):
            patches.set(c10d.Work, name, _refusal(f"work.{name}()", "use work.wait()"))
        for name in _OBJECTS:
            patches.set(dist, name, _refusal(f"torch.distributed.{name}", "give the objects to every rank"))

        def batched(operations: list[Any]) -> Any:
            self.batched = True
            try:
                return [operation.op(operation.tensor, **_peer(operation)) for operation in operations]
            finally:
                self.batched = False

        patches.set(dist, "batch_isend_irecv", batched)

    def _refuse_host_tensors(self, collective: Collective, tensors: list[torch.Tensor]) -> None:
        on_host = any(self.recorder.book.device_of(tensor).startswith("cpu") for tensor in tensors)
        if on_host and collective.kind != "barrier":
            raise TraincastError(
                f"{user_line()}: {collective.kind} of host tensors cannot be captured; put them on cuda or leave it out"
            )

    def _stream(self, collective: Collective) -> int:
        """NCCL's stream of a group, or of a pair; sends and receives of one batch do not wait for each other."""
        ends = dict(collective.ends)
        pair: tuple[Any, ...] = ()
        if COLLECTIVES[collective.kind].route is Route.PAIR:
            pair = (ends["source"], ends["target"])
            pair = ("batch", *pair) if self.batched else tuple(sorted(pair))
        key = (str(collective.group.group_name), *pair)
        if key not in self._streams:
            self._streams[key] = self.recorder.regions.new_stream()
        return self._streams[key]

    def _order(self, *, before: int, after: int) -> None:
        event = self.recorder.regions.new_event()
        self.recorder.control("cuda::event_record", event=event, stream=before)
        self.recorder.control("cuda::stream_wait_event", event=event, stream=after)

    def _execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """PyTorch's own stand-in for the op. Some have none for tensors without data: they get empty ones."""
        if "coalesced_" in func._schema.name and func.namespace == "c10d":
            args = tuple(_emptied(value) for value in args)
        return func(*args, **kwargs)

    def _copy_first(self, func: Any, args: tuple[Any, ...]) -> Any:
        def copied(tensor: torch.Tensor) -> torch.Tensor:
            copy: torch.Tensor = self.recorder.dispatch(
                torch.ops.aten.clone.default, (tensor,), {"memory_format": torch.contiguous_format}
            )
            return copy

        first = [copied(t) for t in args[0]] if isinstance(args[0], list) else copied(args[0])
        return self.run(_COPY_FIRST[func], (first, *args[1:]), {})

    def _remember(self, func: Any, result: Any, collective: Collective, event: int | None) -> None:
        """What to wait for later; `event` is None for a collective that is not part of the recorded step."""
        if func.namespace == "c10d":
            boxed = result[-1] if isinstance(result, (tuple, list)) else result
            work = dist.Work.unbox(boxed)
            self._last = self._works[id(work)] = (work, collective, event)  # held: no other work may get its id
        elif event is not None:
            for tensor in _tensors(result):
                self._unawaited[self.recorder.book.info(tensor).index] = event


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(0)
    return [_emptied(item) for item in value] if isinstance(value, list) else value


def _peer(operation: Any) -> dict[str, Any]:
    to = "dst" if operation.op is dist.isend else "src"
    return {to: operation.peer, "group": operation.group, "tag": operation.tag}


def _refusal(what: str, remedy: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TraincastError(f"{user_line()}: {what} cannot be captured: there are no other ranks; {remedy}")

    return refuse

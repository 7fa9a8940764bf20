"""`DistributedDataParallel` on meta tensors: PyTorch's own class with a reducer that needs no values.

The C++ reducer reads parameters; this one does the same ops in the same order, with PyTorch's own bucket assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

from traincast.capturing.errors import find_user_line
from traincast.capturing.patches import Patches
from traincast.utils.errors import TraincastError

_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
_BROADCAST = "torch.distributed::_broadcast_coalesced"
_BROADCASTS_IN_FLIGHT = 2  # MAX_INFLIGHT of PyTorch's broadcast_coalesced
_REFUSED = ("mixed_precision", "delay_all_reduce_named_params", "lazy_bucket_allocation")
_bucket_assignment: Any = torch._C._distributed_c10d._compute_bucket_assignment_by_size

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


class Bucket:
    """Gradients that are reduced together, in one flat tensor."""

    def __init__(self, indices: list[int], parameters: list[nn.Parameter]) -> None:
        self.indices = indices
        self.parameters = [parameters[i] for i in indices]
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.slots = self.make_views()
        self.pending = len(indices)
        self.work: Any = None

    def make_views(self, flat: torch.Tensor | None = None) -> list[torch.Tensor]:
        """One view of the flat tensor, or of another one, per parameter, laid out like it."""
        whole = self.flat if flat is None else flat
        return [
            torch.as_strided(whole, p.size(), p.stride(), offset)
            for p, offset in zip(self.parameters, self.offsets, strict=True)
        ]


class Reducer:
    """Stands in for `torch.distributed.Reducer`, with its constructor and the methods that Python calls.

    Buckets are first those of the constructor; after the first backward they are built anew in the order in which
    the gradients came, as PyTorch does.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        bucket_indices: list[list[int]],
        per_bucket_size_limits: list[int],
        process_group: dist.ProcessGroup,
        expect_sparse_gradients: list[bool],
        bucket_bytes_cap: int,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        param_to_name_mapping: dict[int, str],
        first_bucket_bytes_cap: int,
        skip_all_reduce_unused_params: bool,
        use_python_reducer: bool,
        bucket_size_limits_for_rebuilding: list[int],
        batched_grad_copy: bool,
        lazy_bucket_allocation: bool = False,  # PyTorch 2.15 and newer
        *,
        around: Around,
        buckets_made: Callable[[list[torch.Tensor]], None],
    ) -> None:
        if any(expect_sparse_gradients):
            raise _make_rejection("sparse gradients")
        self.parameters = parameters
        self.group = process_group
        self.as_views = gradient_as_bucket_view
        self.batched_copy = batched_grad_copy
        self.finds_unused = find_unused_parameters
        self.static = False
        self.hook: tuple[Any, Callable[..., Any]] | None = None  # state and function of a communication hook
        self._unused: list[int] = []
        self._seen: set[int] = set()  # parameters that got a gradient in the first step of a static graph
        self._flags: tuple[torch.Tensor, torch.Tensor] | None = None  # of use: on the host and on the device
        self._used_map: tuple[torch.Tensor, torch.Tensor, Any] | None = None
        self._limits = bucket_size_limits_for_rebuilding or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._around, self._buckets_made = around, buckets_made
        self._order: list[int] = []
        self._pending_unused: list[int] = []
        self._expecting = self._rebuilt = False
        self._updates = False  # whether a hook has run the optimizer on each bucket, so that nothing is copied back
        self._begun = False  # the backward pass: several forward passes may come before one
        self._build_buckets(bucket_indices)
        for index, parameter in enumerate(parameters):
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(partial(self._mark_gradient_ready, index))

    def _build_buckets(self, bucket_indices: list[list[int]]) -> None:
        self.buckets = [Bucket(indices, self.parameters) for indices in bucket_indices]
        self._bucket_of = {i: (b, b.slots[k]) for b in self.buckets for k, i in enumerate(b.indices)}
        self._next = 0
        self._buckets_made([b.flat for b in self.buckets])

    def set_logger(self, logger: Any) -> None:
        """Nothing is logged."""

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def _rebuild_buckets(self) -> bool:
        return False  # done at the end of the first backward already, so that no later step shows it

    def _set_static_graph(self) -> None:
        self.static = True

    def _set_optimizer_in_backward(self) -> None:
        self._updates = True

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        return dist.all_reduce(bucket.buffer(), group=self.group, async_op=True).get_future()

    def _delay_all_reduce(self) -> None:
        """The first step of a static graph: everything is reduced after backward, and what got no gradient is noted."""
        if not self._rebuilt:
            self._unused = [i for i in range(len(self.parameters)) if i not in self._seen]
            self._order = [*self._order, *self._unused]
            self._around(self._finish_first)()

    def _finish_first(self) -> None:
        with torch.no_grad():
            for index in range(len(self.parameters)):
                self._copy_in(self.parameters[index], self._bucket_of[index][1])
            for bucket in self.buckets:
                self._launch_all_reduce(bucket)
        self._next = len(self.buckets)
        self._finish_backward()

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Expects a gradient of every parameter in the backward pass to come, or of those that the outputs need."""
        if self.finds_unused and not self.static:
            reached = _find_reached_parameters(outputs)
            self._unused = [i for i, parameter in enumerate(self.parameters) if id(parameter) not in reached]
        self._pending_unused = list(self._unused)
        if self._expecting and self._begun and self._next < len(self.buckets):
            waiting = [i for b in self.buckets[self._next :] if b.pending for i in b.indices]
            raise TraincastError(
                f"{find_user_line()}: DistributedDataParallel waits for gradients of parameters that took no part in "
                "the "
                f"backward pass (one of number {waiting[0]} to {max(waiting)}); use every parameter in the loss"
            )
        self._expecting, self._begun, self._next = True, False, 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.indices)

    def _mark_gradient_ready(self, index: int, parameter: torch.Tensor) -> None:
        if not self._expecting:
            return
        if not self._rebuilt:
            self._order.append(index)
        if self.static and not self._rebuilt:
            self._seen.add(index)
            return
        for unused in self._pending_unused:
            self._mark_ready(unused)
        self._pending_unused = []
        self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        self._begun = True
        bucket, slot = self._bucket_of[index]
        with torch.no_grad():
            if not self.batched_copy:
                self._copy_in(self.parameters[index], slot)
            bucket.pending -= 1
            while self._next < len(self.buckets) and not self.buckets[self._next].pending:
                self._reduce_bucket(self.buckets[self._next])
                self._next += 1
        if self._next == len(self.buckets):
            if self.finds_unused and not self.static:
                self._reduce_used_map()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._around(self._finish_backward))

    def _copy_in(self, parameter: torch.Tensor, slot: torch.Tensor) -> None:
        """Divided while copied: one kernel per parameter. A gradient that is a view of the bucket stays there."""
        gradient = parameter.grad
        if gradient is None:
            slot.zero_()
            return
        if gradient.untyped_storage()._cdata == slot.untyped_storage()._cdata:
            if self.hook is None:
                slot.div_(self.group.size())
            return
        if self.hook is None:
            torch.mul(gradient, 1.0 / self.group.size(), out=slot)
        else:
            slot.copy_(gradient)
        if self.as_views:
            parameter.grad = slot

    def _reduce_bucket(self, bucket: Bucket) -> None:
        if self.batched_copy:
            torch._foreach_copy_(bucket.slots, [p.grad for p in bucket.parameters if p.grad is not None])
            bucket.flat.div_(self.group.size())
            if self.as_views:
                for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
                    parameter.grad = slot
        self._launch_all_reduce(bucket)

    def _launch_all_reduce(self, bucket: Bucket) -> None:
        if self.hook is None:
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            return
        state, function = self.hook
        bucket.work = function(state, GradBucket(bucket, self.buckets.index(bucket), len(self.buckets)))

    def _reduce_used_map(self) -> None:
        """Which parameters this rank used is added up over all ranks: copied to the device, reduced, copied back only
        where some were not used."""
        if self._flags is None:
            host = torch.ones(len(self.parameters), dtype=torch.int32).pin_memory()
            self._flags = (host, torch.empty_like(host, device=self.parameters[0].device))
        host, device = self._flags
        device.copy_(host, non_blocking=True)
        self._used_map = (host, device, dist.all_reduce(device, group=self.group, async_op=True))

    def _finish_backward(self) -> None:
        """At the end of backward: the stream waits for every bucket, and gradients are copied back."""
        self._expecting = False
        with torch.no_grad():
            for bucket in self.buckets:
                made = bucket.work.wait()
                views = bucket.make_views(_get_hook_tensor(made) if self.hook is not None else None)
                bucket.work = None
                for parameter, view in zip(bucket.parameters, views, strict=True):
                    if parameter.grad is None:
                        self._ask_for_use()
                    elif not self.as_views and not self._updates:
                        with _RecordFunctionFast(_COPY_BACK):
                            parameter.grad.copy_(view)
        self._used_map = None
        if not self._rebuilt and not (self.finds_unused and not self.static):
            self._rebuilt = True
            in_order = [self.parameters[i] for i in self._order]
            indices, _ = _bucket_assignment(in_order, self._limits, [False] * len(self.parameters), self._order)
            self._build_buckets(indices)

    def _ask_for_use(self) -> None:
        """Whether other ranks used a parameter that this one did not: once per step, read from the device."""
        if self._used_map is not None:
            host, device, work = self._used_map
            work.wait()
            host.copy_(device)
            self._used_map = None


class GradBucket:
    """Stands in for `torch.distributed.GradBucket`, which hooks are given."""

    def __init__(self, bucket: Bucket, number: int, count: int) -> None:
        self._bucket, self._number, self._count = bucket, number, count

    def index(self) -> int:
        """Number of the bucket, in the order in which buckets are reduced."""
        return self._number

    def buffer(self) -> torch.Tensor:
        """The flat tensor of gradients."""
        return self._bucket.flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Puts another flat tensor in its place."""
        self._bucket.flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        """One view of the flat tensor per parameter."""
        return self._bucket.make_views()

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the bucket."""
        return self._bucket.parameters

    def is_last(self) -> bool:
        """Whether no other bucket comes after this one."""
        return self._number == self._count - 1


def _get_hook_tensor(value: Any) -> torch.Tensor:
    """The flat tensor that a hook's future gives, alone or in a list."""
    flat: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return flat


def _find_reached_parameters(outputs: list[torch.Tensor]) -> set[int]:
    """Parameters that gradients of these outputs flow to, by id."""
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    met, found = set(todo), set()
    while todo:
        node: Any = todo.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        for after, _ in node.next_functions:
            if after is not None and after not in met:
                met.add(after)
                todo.append(after)
    return found


class _Logger:
    """Stands in for `torch.distributed.Logger`: takes notes of nothing."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def broadcast_coalesced(
    group: dist.ProcessGroup, tensors: list[torch.Tensor], buffer_size: int, source: int = 0
) -> None:
    """Buffers broadcast in flat pieces of one type, two pieces in flight, and copied back.

    One top-level op, since it is one call into C++: no Python runs between its copies.
    """
    with _RecordFunctionFast(_BROADCAST):
        _broadcast_coalesced(group, tensors, buffer_size, source)


def _broadcast_coalesced(group: dist.ProcessGroup, tensors: list[torch.Tensor], buffer_size: int, source: int) -> None:
    assignment, _ = _bucket_assignment(tensors, [buffer_size])
    flying: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []

    def land() -> None:
        work, flat, members = flying.pop(0)
        work.wait()
        for tensor, part in zip(members, torch._C._nn.unflatten_dense_tensors(flat, members), strict=True):
            tensor.copy_(part, non_blocking=True)

    for indices in assignment:
        members = [tensors[i] for i in indices]
        flat = torch._C._nn.flatten_dense_tensors(members)
        if len(flying) == _BROADCASTS_IN_FLIGHT:
            land()
        work = dist.broadcast(flat, group=group, group_src=source, async_op=True)
        flying.append((work, flat, members))
    while flying:
        land()


def install_ddp(patches: Patches, around: Around, buckets_made: Callable[[list[torch.Tensor]], None]) -> None:
    """Puts the reducer in place until the patches are undone. `around` wraps callbacks of the autograd engine."""
    patches.set_attribute(dist, "Reducer", partial(Reducer, around=around, buckets_made=buckets_made))
    patches.set_attribute(dist, "Logger", _Logger)
    patches.set_attribute(dist, "_broadcast_coalesced", broadcast_coalesced)
    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):  # nothing to compare, nothing to send
        patches.set_attribute(ddp_module, name, lambda *args, **kwargs: None)
    original = DistributedDataParallel.__init__

    def init(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        for name in _REFUSED:
            if options.get(name):
                raise _make_rejection(name)
        original(self, module, [torch.cuda.current_device()] if device_ids else None, None, **options)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _make_rejection("join")

    patches.set_attribute(DistributedDataParallel, "__init__", init)
    patches.set_attribute(DistributedDataParallel, "join", refuse)
    patches.set_attribute(dist, "_register_comm_hook", _register_hook)
    patches.set_attribute(dist, "_register_builtin_comm_hook", _register_builtin)


def _register_hook(reducer: Reducer, state: Any, hook: Callable[..., Any]) -> None:
    reducer.hook = (state, hook)


def _register_builtin(reducer: Reducer, kind: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    halves = str(kind).endswith("FP16_COMPRESS")
    reducer.hook = (None, default_hooks.fp16_compress_hook if halves else default_hooks.allreduce_hook)


def _make_rejection(what: str) -> TraincastError:
    return TraincastError(f"{find_user_line()}: DistributedDataParallel with {what} cannot be captured; leave it out")

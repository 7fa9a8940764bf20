"""What really happens on this CPU: PyTorch's execution trace and profiler of the same step."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from traincast.ir import Op, Program

# What CUDA runs (left) where the CPU runs another op (right). Everything else must be the same op.
ON_CUDA = {
    "aten::cudnn_batch_norm": "aten::native_batch_norm",
    "aten::cudnn_batch_norm_backward": "aten::native_batch_norm_backward",
    "aten::new_zeros": "aten::zeros",  # in backward of topk and the like: written in Python for meta tensors
}
# Ops whose inputs differ between the devices: intermediate results of another size, an input more.
OTHER_INPUTS = ("aten::_embedding_bag_backward", "aten::cudnn_batch_norm_backward")
_SAVED = ("aten::detach", "aten::clone")  # what hooks on saved tensors run, and ops that write over what they save
_OBSERVER = "[pytorch|profiler|execution_trace|"
_THREAD = f"{_OBSERVER}thread]"
_ENGINE = "autograd::engine::evaluate_function: "


@dataclass
class Node:
    """An op of an execution trace."""

    name: str
    shapes: list[Any]
    types: list[str]
    values: list[Any]
    children: list[Node] = field(default_factory=list)

    def all(self) -> Iterator[Node]:
        """The node and everything below it."""
        yield self
        for child in self.children:
            yield from child.all()


def execution_trace(step: Callable[[], object], folder: Path, *, threads: int | None = None) -> list[Node]:
    """The second run of a step as PyTorch's `ExecutionTraceObserver` writes it: top-level nodes in order.

    Those of all threads, or of the first this many: gloo copies in threads of its own.
    """
    step()
    path = folder / "trace.json"
    with observed(path):
        step()
    return read_trace(path, threads)


@contextmanager
def observed(path: Path) -> Iterator[None]:
    """Writes an execution trace of what runs inside."""
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(path))
    observer.start()
    try:
        yield
    finally:
        observer.stop()
        observer.unregister_callback()


def read_trace(path: Path, threads: int | None = None) -> list[Node]:
    """Top-level nodes of an execution trace in order."""
    raw = sorted(json.loads(path.read_text())["nodes"], key=lambda node: node["id"])
    nodes: dict[int, Node] = {}
    top: list[Node] = []
    roots = [entry["id"] for entry in raw if entry["name"] == _THREAD][:threads]
    for entry in raw:
        inputs = entry.get("inputs", {})
        node = Node(entry["name"], inputs.get("shapes", []), inputs.get("types", []), inputs.get("values", []))
        parent = nodes.get(entry["ctrl_deps"])
        nodes[entry["id"]] = node
        if not entry["name"].startswith(_OBSERVER):
            at_top = parent is None or parent.name.startswith(_OBSERVER)
            if not at_top:
                parent.children.append(node)
            elif threads is None or entry["ctrl_deps"] in roots:
                top.append(node)
    return top


def profiled_scopes(step: Callable[[], object]) -> list[str]:
    """Names of the top-level host events of the second run of a step, as `torch.profiler` shows them."""
    step()
    with torch.autograd.profiler.profile() as profiler:
        step()
    tree = sorted(profiler.kineto_results.experimental_event_tree(), key=lambda event: event.start_time_ns)
    return [event.name.removeprefix(_ENGINE) for event in tree]


@cache
def is_composite(name: str) -> bool:
    """Whether an op is only made of other ops, so that it may have run none at all."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    key = "CompositeImplicitAutograd"
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for op in overloads if _real(op))


def _real(op: Any) -> bool:
    return torch._C._dispatch_has_kernel(op.name())


def tensors_of(node: Node) -> list[tuple[tuple[int, ...], str]]:
    """(shape, dtype) of every tensor input of a node, lists flattened."""
    return list(_tensors(node.shapes, node.types))


def _tensors(shapes: Any, types: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    for shape, kind in zip(shapes, types, strict=True):
        if kind.startswith("Tensor(nullptr"):
            continue
        if kind.startswith("Tensor("):
            yield tuple(shape), _DTYPES[kind[7:-1]]
        elif kind.startswith("GenericList["):
            inner = re.findall(r"[A-Za-z]+\([^)]*\)|[A-Za-z]+", kind[12:-1])
            yield from _tensors(shape, inner)


_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "long int": "int64", "long": "int64", "int": "int32", "bool": "bool", "unsigned char": "uint8",
}  # fmt: skip


def differences(nodes: list[Node], left: list[Op]) -> Iterator[str]:
    """Simulates the real trace; each captured op stands for a node and everything below it."""
    for node in nodes:
        saved = [child for child in node.children if child.name in _SAVED]
        ahead = _saves(left, len(saved))
        if _stands_for(node, left[ahead : ahead + 1]):
            after = _saves(left[ahead + 1 :], len(saved) - ahead)
            for real in (*saved[:ahead], node, *saved[ahead : ahead + after]):
                yield from _other_tensors(real, left.pop(0))
        elif node.children:
            yield from differences(node.children, left)
        elif node.name.startswith("aten::") and not is_composite(node.name) and node.name != "aten::lift_fresh":
            yield f"{node.name} {tensors_of(node)} is missing before {left[0].name if left else 'the end'}"


def _saves(left: list[Op], most: int) -> int:
    """How many of the first ops save tensors for backward: a trace shows them inside the op that they are saved for."""
    return next((number for number, op in enumerate(left[:most]) if op.name not in _SAVED), min(most, len(left)))


def _stands_for(node: Node, first: list[Op]) -> bool:
    return any(node.name in (op.name, ON_CUDA.get(op.name)) and not _wraps(node, op) for op in first)


def _other_tensors(node: Node, op: Op) -> Iterator[str]:
    captured = [(t.spec.shape, t.spec.dtype) for t in op.inputs]
    if op.name not in OTHER_INPUTS and node.name != "aten::zeros" and captured != _without_numbers(node, len(captured)):
        yield f"{op.name}: captured {captured}, real {tensors_of(node)}"


def _wraps(node: Node, op: Op) -> bool:
    """Whether a node is an op on DTensors, which calls itself on their shards: the op that was captured."""
    inner = any(below.name == node.name for child in node.children for below in child.all())
    return (
        inner
        and bool(op.inputs)
        and _without_numbers(node, len(op.inputs)) != [(t.spec.shape, t.spec.dtype) for t in op.inputs]
    )


def _without_numbers(node: Node, count: int) -> list:
    """A trace shows Python numbers as tensors without dimensions, at the end."""
    tensors = tensors_of(node)
    while len(tensors) > count and tensors[-1][0] == ():
        tensors.pop()
    return tensors


@dataclass
class Peak:
    """Most bytes held during a step, and how many fewer they are without scratch space: what an op takes and gives back
    before it ends."""

    peak_bytes: int
    scratch_bytes: int


def profiled_peak(step: Callable[[], object], before: list[torch.Tensor]) -> Peak:
    """Peak of the second run of a step: `before` plus what the allocator reports.

    All gradients of the first run are dropped first, those of sharded parameters too. The profiler does not see memory
    freed that it did not see taken, unless it remembers the address from another time: then the peak is too low.
    """
    step()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in before}
    for tensor in live_tensors():
        if tensor.is_leaf:
            tensor.grad = None
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        step()
    changes = _allocations(profiler.kineto_results.experimental_event_tree())
    scratch = _scratch(changes)
    kept = [size for number, (size, *_) in enumerate(changes) if number not in scratch]
    start = sum(held.values())
    with_scratch, without = (
        start + max(accumulate(sizes, initial=0)) for sizes in ([size for size, *_ in changes], kept)
    )
    return Peak(with_scratch, with_scratch - without)


def _scratch(changes: list[tuple[int, int, Any]]) -> set[int]:
    """Which changes take memory that the same op gives back, or give it back."""
    taken: dict[int, tuple[int, Any]] = {}
    found = set()
    for number, (size, pointer, op) in enumerate(changes):
        if size > 0:
            taken[pointer] = (number, op)
            continue
        first, owner = taken.pop(pointer, (-1, None))
        if owner is not None and owner == op:
            found |= {first, number}
    return found


def _allocations(tree: Any) -> list[tuple[int, int, Any]]:
    """(bytes, address, op around it that is not made of others) of every allocation (bytes below zero: release), in
    order."""
    found = []
    todo = [(event, None) for event in tree]
    while todo:
        event, op = todo.pop()
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, op))
        is_op = op is None and event.name.startswith("aten::") and not is_composite(event.name)
        todo.extend((child, event.id if is_op else op) for child in event.children)
    return [(size, pointer, op) for _, size, pointer, op in sorted(found, key=lambda row: row[0])]


def live_tensors() -> list[torch.Tensor]:
    """Every dense tensor on the host that Python knows of, but for those that stand for several."""
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and type(t).__name__ != "ShardedTensor"]
    return [t for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]


def peak_bytes(program: Program) -> int:
    """As `peak_memory`, without the blocks of a GPU's allocator, which a CPU does not have."""
    c, size = program.columns, program.storage_nbytes
    change = np.zeros(program.num_ops + 2, dtype=np.int64)
    np.add.at(change, np.maximum(c.storage_alloc, 0), size)
    np.subtract.at(change, np.minimum(c.storage_free, program.num_ops) + 1, size)
    return int(change.cumsum().max())

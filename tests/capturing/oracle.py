"""What really happens on this CPU: PyTorch's execution trace and profiler of the same step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from traincast.workload import Op

# What CUDA runs (left) where the CPU runs another op (right). Everything else must be the same op.
ON_CUDA = {
    "aten::cudnn_batch_norm": "aten::native_batch_norm",
    "aten::cudnn_batch_norm_backward": "aten::native_batch_norm_backward",
}
# Ops whose inputs differ between the devices: intermediate results of another size, an input more.
OTHER_INPUTS = ("aten::_embedding_bag_backward", "aten::cudnn_batch_norm_backward")
_ENGINE = "autograd::engine::evaluate_function: "


@dataclass
class Node:
    """An op of an execution trace."""

    name: str
    shapes: list[Any]
    types: list[str]
    children: list[Node] = field(default_factory=list)


def execution_trace(step: Callable[[], object], folder: Path) -> list[Node]:
    """The second run of a step as PyTorch's `ExecutionTraceObserver` writes it: top-level nodes in order."""
    step()
    path = folder / "trace.json"
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(path))
    observer.start()
    step()
    observer.stop()
    observer.unregister_callback()
    raw = sorted(json.loads(path.read_text())["nodes"], key=lambda node: node["id"])
    nodes: dict[int, Node] = {}
    top: list[Node] = []
    for entry in raw:
        inputs = entry.get("inputs", {})
        node = Node(entry["name"], inputs.get("shapes", []), inputs.get("types", []))
        parent = nodes.get(entry["ctrl_deps"])
        nodes[entry["id"]] = node
        if not entry["name"].startswith("["):
            (top if parent is None or parent.name.startswith("[") else parent.children).append(node)
    return top


def profiled_scopes(step: Callable[[], object]) -> list[str]:
    """Names of the top-level host events of the second run of a step, as `torch.profiler` shows them."""
    step()
    with torch.autograd.profiler.profile() as profiler:
        step()
    tree = sorted(profiler.kineto_results.experimental_event_tree(), key=lambda event: event.start_time_ns)
    return [event.name.removeprefix(_ENGINE) for event in tree]


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
    """Walks the real trace; each captured op stands for a node and everything below it."""
    for node in nodes:
        if left and node.name in (left[0].name, ON_CUDA.get(left[0].name)):
            op = left.pop(0)
            captured = [(t.spec.shape, t.spec.dtype) for t in op.inputs]
            if op.name not in OTHER_INPUTS and captured != _without_numbers(node, len(captured)):
                yield f"{op.name}: captured {captured}, real {tensors_of(node)}"
        elif node.children:
            yield from differences(node.children, left)
        elif node.name.startswith("aten::") and not is_composite(node.name) and node.name != "aten::lift_fresh":
            yield f"{node.name} {tensors_of(node)} is missing before {left[0].name if left else 'the end'}"


def _without_numbers(node: Node, count: int) -> list:
    """A trace shows Python numbers as tensors without dimensions, at the end."""
    tensors = tensors_of(node)
    while len(tensors) > count and tensors[-1][0] == ():
        tensors.pop()
    return tensors


@dataclass
class Peak:
    """Most bytes held during a step, and how many of them were scratch space inside the op running then."""

    peak_bytes: int
    scratch_bytes: int


def profiled_peak(step: Callable[[], object], before: list[torch.Tensor]) -> Peak:
    """Peak of the second run of a step: `before` plus what the allocator reports.

    Gradients of the first run are dropped first: the profiler does not see memory freed that it did not see taken.
    """
    step()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in before}
    for tensor in before:
        tensor.grad = None
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        step()
    live: dict[int, tuple[int, Any]] = {}
    now, peak = sum(held.values()), Peak(0, 0)
    result = max(t.untyped_storage().nbytes() for t in before)  # a gradient of a table: a result, no scratch space
    for size, pointer, op in _allocations(profiler.kineto_results.experimental_event_tree()):
        now += size
        live.pop(pointer, None)
        if size > 0:
            live[pointer] = (size, op)
        if now > peak.peak_bytes:
            inside = sum(held for held, owner in live.values() if op is not None and owner is op and held < result)
            peak = Peak(now, inside)
    return peak


def _allocations(tree: Any) -> list[tuple[int, int, Any]]:
    """(bytes, address, outermost op around it) of every allocation (bytes below zero: release), in order."""
    found = []
    todo = [(event, None) for event in tree]
    while todo:
        event, op = todo.pop()
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, op))
        outermost = event.id if op is None and event.name.startswith("aten::") else op
        todo.extend((child, outermost) for child in event.children)
    return [(size, pointer, op) for _, size, pointer, op in sorted(found, key=lambda row: row[0])]

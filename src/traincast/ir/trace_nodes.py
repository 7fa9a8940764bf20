"""A program as the nodes of a PyTorch execution trace: what both trace exports write.

Node, tensor and storage ids come from one counter, as `torch.profiler.ExecutionTraceObserver` gives them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from traincast.ir.ops import Op, Phase, Scalar, Scope, Signature, Tensor
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import write_bytes

Value: TypeAlias = "bool | int | float | str | list[Value]"
Ids: TypeAlias = Callable[[Hashable], int]

_FUNCTION, _BACKWARD_FUNCTION, _USER_SCOPE = 0, 1, 7  # torch's RecordScope
_CPP_TYPES = {
    "float64": "double", "float32": "float", "float16": "c10::Half", "bfloat16": "c10::BFloat16",
    "float8_e4m3fn": "c10::Float8_e4m3fn", "float8_e5m2": "c10::Float8_e5m2", "int64": "long int",
    "int32": "int", "int16": "short int", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
    "complex64": "c10::complex<float>",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arguments:
    """Inputs or outputs of a node: one entry per argument in each list."""

    values: list[Value] = field(default_factory=list)
    shapes: list[Value] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    strides: list[Value] = field(default_factory=list)

    def add(self, value: Value, shape: Value, kind: str, stride: Value) -> None:
        """Appends one argument."""
        self.values.append(value)
        self.shapes.append(shape)
        self.types.append(kind)
        self.strides.append(stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """One node. `parent` is the id of the node it was called from; `scope` and `op` index the program, or are -1.

    `kind` is torch's RecordScope: 0 a function, 1 a backward function, 7 a user scope.
    """

    id: int
    name: str
    parent: int
    thread: int
    kind: int = _USER_SCOPE
    scope: int = -1
    op: int = -1
    sequence: int = -1
    forward_parent: int = 0
    forward_thread: int = 0
    schema: str = ""
    inputs: Arguments = field(default_factory=Arguments)
    outputs: Arguments = field(default_factory=Arguments)


def select_program(workload: Workload, rank: int) -> Program:
    """The program of a rank."""
    if not 0 <= rank < len(workload.ranks):
        raise TraincastError(
            f"workload '{workload.name}' has no rank {rank}; it has ranks 0 to {len(workload.ranks) - 1}"
        )
    return workload.programs[workload.ranks[rank]]


def list_trace_nodes(program: Program) -> list[TraceNode]:
    """Process, threads, scopes and ops in host order, ids ascending; a scope that is its only op is one node."""
    counter = count(1)
    known: dict[Hashable, int] = {}

    def ids(thing: Hashable) -> int:
        if thing not in known:
            known[thing] = next(counter)
        return known[thing]

    root = TraceNode(id=next(counter), name="[pytorch|profiler|execution_trace|process]", parent=1, thread=0)
    nodes = [root]
    threads: dict[int, int] = {}
    sequences = _number_sequences(program)
    for scope in program.scopes:
        if scope.thread not in threads:
            threads[scope.thread] = next(counter)
            name = "[pytorch|profiler|execution_trace|thread]"
            nodes.append(TraceNode(id=threads[scope.thread], name=name, parent=root.id, thread=scope.thread + 1))
        nodes += _list_scope_nodes(program, scope, threads[scope.thread], sequences, counter, ids)
    return nodes


def _number_sequences(program: Program) -> list[int]:
    """Autograd sequence number of every op: a forward op and those that compute its gradient share one."""
    forward = program.columns.op_forward.tolist()
    number = {op: i for i, op in enumerate(sorted({op for op in forward if op >= 0}))}
    return [number.get(op if back < 0 else back, -1) for op, back in enumerate(forward)]


def _list_scope_nodes(
    program: Program, scope: Scope, thread: int, sequences: list[int], counter: Iterator[int], ids: Ids
) -> list[TraceNode]:
    ops = program.ops[scope.first_op : scope.first_op + scope.num_ops]
    if len(ops) == 1 and ops[0].name == scope.name:
        return [_make_op_node(ops[0], thread, sequences[ops[0].index], counter, ids)]
    nodes = []
    backward = scope.phase == Phase.BACKWARD and not scope.name.startswith(("aten::", "autograd::"))
    node = TraceNode(
        id=next(counter),
        name=scope.name,
        parent=thread,
        thread=scope.thread + 1,
        kind=_FUNCTION if "::" in scope.name else _USER_SCOPE,
        scope=scope.index,
        sequence=max((sequences[op.index] for op in ops), default=-1),
    )
    if backward:
        engine = f"autograd::engine::evaluate_function: {scope.name}"
        nodes.append(replace(node, name=engine, kind=_FUNCTION, sequence=-1))
        node = replace(
            node,
            id=next(counter),
            parent=node.id,
            kind=_BACKWARD_FUNCTION,
            forward_parent=node.id,
            forward_thread=1,
        )
    nodes.append(node)
    for op in ops:
        # Only the function that autograd recorded carries the number; what runs inside its gradient does not.
        sequence = -1 if op.forward >= 0 else sequences[op.index]
        nodes.append(_make_op_node(op, node.id, sequence, counter, ids))
    return nodes


def _make_op_node(op: Op, parent: int, sequence: int, counter: Iterator[int], ids: Ids) -> TraceNode:
    number = next(counter)
    inputs, outputs = Arguments(), Arguments()
    start = 0
    for _, size in op.signature.groups or [("", 1)] * len(op.inputs):
        _add_tensors(inputs, op.inputs[start : start + size], ids)
        start += size
    for _, value in op.signature.scalars:
        shape = _describe_shape(value)
        inputs.add(_describe_value(value), shape, _describe_type(value), shape)
    for tensor in op.outputs:
        _add_tensors(outputs, [tensor], ids)
    return TraceNode(
        id=number,
        name=op.name,
        parent=parent,
        thread=op.thread + 1,
        kind=_FUNCTION,
        scope=op.scope,
        op=op.index,
        sequence=sequence,
        schema=_write_schema(op.signature),
        inputs=inputs,
        outputs=outputs,
    )


def _add_tensors(arguments: Arguments, tensors: Sequence[Tensor], ids: Ids) -> None:
    """One tensor, a list of them, or an absent one."""
    if not tensors:
        arguments.add("<None>", [], "None", [])
        return
    values: list[Value] = [_describe_tensor(tensor, ids) for tensor in tensors]
    kinds = [f"Tensor({_CPP_TYPES[tensor.spec.dtype]})" for tensor in tensors]
    shapes: list[Value] = [list(tensor.spec.shape) for tensor in tensors]
    strides: list[Value] = [list(tensor.spec.stride) for tensor in tensors]
    if len(tensors) == 1:
        arguments.add(values[0], shapes[0], kinds[0], strides[0])
    else:
        arguments.add(values, shapes, f"GenericList[{','.join(kinds)}]", strides)


def _describe_tensor(tensor: Tensor, ids: Ids) -> list[Value]:
    """Tensor id, storage id, offset (not known: 0), elements, bytes per element, device."""
    device = "cuda:0" if tensor.spec.device == "cuda" else "cpu"
    spec = tensor.spec
    return [ids(("tensor", tensor.id)), ids(("storage", tensor.storage)), 0, spec.numel, spec.itemsize, device]


def _describe_value(value: Scalar) -> Value:
    if value is None:
        return "<None>"
    if isinstance(value, tuple):
        return [_describe_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _describe_shape(value: Scalar) -> Value:
    return [_describe_shape(item) for item in value] if isinstance(value, tuple) else []


def _describe_type(value: Scalar) -> str:
    if isinstance(value, tuple):
        return f"GenericList[{','.join(_describe_type(item) for item in value)}]"
    if value is None:
        return "None"
    return {bool: "Bool", int: "Int", float: "Double", str: "String"}[type(value)]


def _write_schema(signature: Signature) -> str:
    """A schema for the arguments as they are written, from the workload itself and not from torch's registry."""
    name = f"{signature.name}.{signature.overload}" if signature.overload else signature.name
    groups = signature.groups or tuple((f"input{i}", 1) for i in range(len(signature.inputs)))
    arguments = [f"{ {0: 'Tensor?', 1: 'Tensor'}.get(size, 'Tensor[]') } {name}" for name, size in groups]
    arguments += [f"{_name_schema_type(value)} {name}" for name, value in signature.scalars]
    outputs = ", ".join(["Tensor"] * len(signature.outputs))
    return f"{name}({', '.join(arguments)}) -> {outputs if len(signature.outputs) == 1 else f'({outputs})'}"


def _name_schema_type(value: Scalar) -> str:
    if isinstance(value, tuple):
        return f"{_name_schema_type(value[0]) if value else 'int'}[]"
    if value is None:
        return "Scalar?"
    return {bool: "bool", int: "int", float: "float", str: "str"}[type(value)]


SCHEMA = "1.1.1-chakra.0.0.4"


def export_pytorch_et(workload: Workload, rank: int, path: str | Path) -> None:
    """Writes the program of `rank` as a PyTorch execution trace. Host order is kept; streams have no place there."""
    nodes = list_trace_nodes(select_program(workload, rank))
    trace = {
        "schema": SCHEMA,
        "pid": rank + 1,
        "time": "1970-01-01 00:00:00",
        "start_ts": 0,
        "nodes": [_describe_et_node(node) for node in nodes],
        "finish_ts": 0,
    }
    write_bytes(path, json.dumps(trace, separators=(",", ":"), allow_nan=False).encode())


def _describe_et_node(node: TraceNode) -> dict[str, Any]:
    return {
        "id": node.id,
        "name": node.name,
        "ctrl_deps": node.parent,
        "inputs": _describe_et_arguments(node.inputs),
        "outputs": _describe_et_arguments(node.outputs),
        "attrs": [
            {"name": name, "type": kind, "value": value}
            for name, kind, value in (
                ("rf_id", "uint64", node.id),
                ("fw_parent", "uint64", node.forward_parent),
                ("seq_id", "int64", node.sequence),
                ("scope", "uint64", node.kind),
                ("tid", "uint64", node.thread),
                ("fw_tid", "uint64", node.forward_thread),
                ("op_schema", "string", node.schema),
                ("kernel_backend", "string", ""),
                ("kernel_file", "string", ""),
                ("tensor_range", "string", ""),
            )
        ],
    }


def _describe_et_arguments(arguments: Arguments) -> dict[str, Any]:
    return {
        "values": arguments.values,
        "shapes": arguments.shapes,
        "types": arguments.types,
        "strides": arguments.strides,
    }

"""A rank's program as a PyTorch execution trace, and as a Chakra one (`.et`: length-delimited protobuf messages,
mlcommons/chakra).

Node, tensor and storage ids come from one counter, as `torch.profiler.ExecutionTraceObserver` gives them.

The few wire types needed are written here, so that no protobuf package is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from traincast.ir.collectives import parse_collective_name
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


VERSION = "0.0.4"
_COMP, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7  # NodeType


def export_chakra_et(workload: Workload, rank: int, path: str | Path, durations: Sequence[float] | None = None) -> None:
    """Writes the program of `rank` as a Chakra trace; `durations` are seconds per op (whole microseconds in the file).

    A node depends (ctrl) on the node it is called from, the one before it on its host thread or stream and the
    scope its thread waits for; it depends (data) on the ops that last wrote its inputs.
    """
    program = select_program(workload, rank)
    if durations is not None and len(durations) != program.num_ops:
        raise TraincastError(f"{len(durations)} durations were given for {program.num_ops} ops")
    nodes = [node for node in list_trace_nodes(program) if node.scope >= 0]
    control, data = _find_control_deps(program, nodes), _find_data_deps(program, nodes)
    metadata = _encode_text(1, VERSION) + _encode_attributes(
        2, [("schema", "1.1.1-chakra.0.0.4"), ("workload", workload.name)]
    )
    messages = [metadata]
    for node, ctrl_deps, data_deps in zip(nodes, control, data, strict=True):
        op = program.ops[node.op] if node.op >= 0 else None
        seconds = durations[op.index] if durations is not None and op else 0.0
        messages.append(_encode_node(node, op, ctrl_deps, data_deps, seconds))
    write_bytes(path, b"".join(_encode_varint(len(message)) + message for message in messages))


def _find_control_deps(program: Program, nodes: list[TraceNode]) -> list[list[int]]:
    """Host nodes follow each other on their thread, ops on their stream; both follow what they are called from.

    An op that is its own scope only follows the host: were the host to follow it, it would wait for the device.
    """
    known = {node.id for node in nodes}
    host: dict[int, int] = {}  # last host node of a thread
    device: dict[int, int] = {}  # last op of a stream
    returned: dict[int, int] = {}  # the host node after which a scope has been called
    result = []
    for node in nodes:
        deps = {node.parent} & known or {host.get(node.thread, 0)}
        after = program.scopes[node.scope].after
        if after >= 0 and node.scope not in returned:
            deps.add(returned[after])
        if node.op < 0:
            host[node.thread] = node.id
        else:
            stream = program.ops[node.op].stream
            deps.add(device.get(stream, 0))
            device[stream] = node.id
        returned[node.scope] = host.get(node.thread, 0)
        result.append(sorted(deps - {0}))
    return result


def _find_data_deps(program: Program, nodes: list[TraceNode]) -> list[list[int]]:
    """Nodes of the ops that last wrote the storages an op reads; an op without outputs writes its inputs."""
    writer: dict[int, int] = {}
    result = []
    for node in nodes:
        op = program.ops[node.op] if node.op >= 0 else None
        result.append(sorted({writer[t.storage] for t in op.inputs if t.storage in writer}) if op else [])
        if op:
            writer.update(dict.fromkeys((t.storage for t in op.outputs or op.inputs), node.id))
    return result


def _encode_node(node: TraceNode, op: Op | None, ctrl_deps: list[int], data_deps: list[int], seconds: float) -> bytes:
    kind, extra = _describe_communication(op)
    on_device = op is not None and any(t.spec.device == "cuda" for t in (*op.inputs, *op.outputs))
    return b"".join(
        (
            _encode_number(1, node.id),
            _encode_text(2, node.name),
            _encode_number(3, kind),
            _encode_packed(4, ctrl_deps),
            _encode_packed(5, data_deps),
            _encode_number(7, round(seconds * 1e6)),
            _encode_arguments(8, node.inputs),
            _encode_arguments(9, node.outputs),
            _encode_attributes(
                10,
                [
                    ("is_cpu_op", not on_device),
                    ("fw_parent", node.forward_parent),
                    ("fw_tid", node.forward_thread),
                    ("op_schema", node.schema),
                    ("seq_id", node.sequence),
                    ("rf_id", node.id),
                    ("scope", node.kind),
                    ("tid", node.thread),
                    *([("stream", op.stream)] if op else []),
                    *extra,
                ],
            ),
        )
    )


def _describe_communication(op: Op | None) -> tuple[int, list[tuple[str, int]]]:
    """Node type and communication attributes of an op."""
    namespace, _, name = op.name.partition("::") if op else ("", "", "")
    if op is None or "c10d" not in namespace or name.startswith("wait"):
        return _COMP, []
    size = sum(t.spec.nbytes for t in op.inputs)
    bare = name.lstrip("_")
    if bare.startswith(("send", "isend", "recv", "irecv")):
        return (_SEND if "send" in bare else _RECV), [("comm_size", size)]
    collective = parse_collective_name(bare)
    if collective is not None and collective.chakra >= 0:
        return _COLLECTIVE, [("comm_type", collective.chakra), ("comm_size", size)]
    raise TraincastError(f"op {op.index} ({op.name}) is a communication that Chakra has no name for")


def _encode_arguments(number: int, arguments: Arguments) -> bytes:
    """IOInfo: Python literals as text, which is what Chakra's own converter writes."""
    values, shapes, types = str(arguments.values), str(arguments.shapes), str(arguments.types)
    return _encode_bytes(number, _encode_text(1, values) + _encode_text(2, shapes) + _encode_text(3, types))


def _encode_attributes(number: int, attributes: Iterable[tuple[str, bool | int | str]]) -> bytes:
    return b"".join(
        _encode_bytes(number, _encode_text(1, name) + _encode_attribute(value)) for name, value in attributes
    )


def _encode_attribute(value: bool | int | str) -> bytes:
    """A member of AttributeProto's `value`: written even when zero, since which member is set carries meaning."""
    if isinstance(value, str):
        return _encode_text(29, value)
    field = 27 if isinstance(value, bool) else 9
    return _encode_varint(field << 3) + _encode_varint(int(value) % (1 << 64))


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_number(field: int, value: int) -> bytes:
    return _encode_varint(field << 3) + _encode_varint(value) if value else b""


def _encode_bytes(field: int, value: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(value)) + value


def _encode_text(field: int, value: str) -> bytes:
    return _encode_bytes(field, value.encode("utf-8", "replace"))


def _encode_packed(field: int, values: Sequence[int]) -> bytes:
    return _encode_bytes(field, b"".join(_encode_varint(value) for value in values)) if values else b""

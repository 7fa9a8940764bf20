"""A rank's program as a Chakra execution trace (`.et`: length-delimited protobuf messages, mlcommons/chakra).

The few wire types needed are written here, so that no protobuf package is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from traincast.ir.collectives import parse_collective_name
from traincast.ir.ops import Op
from traincast.ir.program import Program
from traincast.ir.trace_nodes import Arguments, TraceNode, list_trace_nodes, select_program
from traincast.ir.workload import Workload
from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import write_bytes

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

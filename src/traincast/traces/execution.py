"""PyTorch execution traces (schemas 1.0.1 to 1.1.x-chakra) and Chakra's workload graphs, both JSON: their nodes, and
which of them each op of a timeline is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from traincast.traces.arguments import parse_arguments
from traincast.traces.calls import find_rows
from traincast.traces.events import LIMIT, UNREADABLE, Int, Interner, Kind, RowSink, Table
from traincast.traces.link import Linked
from traincast.traces.scan import scan_file
from traincast.utils.arrays import BoolArray, IntArray
from traincast.utils.errors import TraincastError, escape_text

NODE = np.dtype(
    [
        ("id", "i8"),
        ("parent", "i8"),  # id of the node it was called from, or 0
        ("record_function", "i8"),  # or -1
        ("sequence", "i8"),  # or -1
        ("forward_parent", "i8"),  # or 0
        ("start", "i8"),  # nanoseconds, or -1
        ("duration", "i8"),  # nanoseconds, or -1
        ("thread", "i8"),
        ("name", "i4"),  # index into names
        ("details", "i4"),  # index into details
        ("schema", "i4"),  # index into schemas
        ("scope", "i4"),  # torch's RecordScope, or Chakra's node type
    ]
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ExecutionTrace:
    """A PyTorch execution trace or a Chakra trace, as columns in file order (see `NODE`).

    `details` are shapes and types of inputs and outputs as JSON (values too where an op communicates), shared by equal
    nodes. `needs` are the ids each node depends on: those of row i are `needs[needs_ptr[i] : needs_ptr[i + 1]]`.
    """

    path: Path
    schema: str
    nodes: Table
    names: tuple[str, ...]
    details: tuple[bytes, ...]
    schemas: tuple[str, ...]
    needs: IntArray
    needs_ptr: IntArray
    notes: tuple[str, ...] = field(default=())


def check_acyclic(trace: ExecutionTrace) -> None:
    """Rejects a trace in which a node is called from itself or needs itself, however indirectly."""
    ids = trace.nodes["id"]
    order = np.argsort(ids, kind="stable")
    parents = find_rows(ids[order], order, trace.nodes["parent"])
    roots = parents == np.arange(len(ids))
    parents[roots] = -1  # the process is its own parent
    at = parents.copy()
    for _ in range(max(len(ids), 1).bit_length()):  # each round doubles the distance looked back
        at = np.where(at >= 0, at[np.maximum(at, 0)], -1)
    if (at >= 0).any():
        looped = int(ids[int(np.argmax(at >= 0))])
        raise TraincastError(f"'{trace.path}' calls in a circle: node {looped} is its own ancestor")
    if len(trace.needs):
        _check_needs(trace, find_rows(ids[order], order, trace.needs))


def _check_needs(trace: ExecutionTrace, needs: IntArray) -> None:
    """Kahn's algorithm: nodes whose needs are all met are taken away until none is left."""
    count = len(trace.nodes)
    user = np.repeat(np.arange(count), np.diff(trace.needs_ptr))
    known = needs >= 0
    needs, user = needs[known], user[known]
    open_needs = np.bincount(user, minlength=count).tolist()
    order = np.argsort(needs, kind="stable")
    users = user[order].tolist()
    first = np.searchsorted(needs[order], np.arange(count + 1)).tolist()
    ready = [row for row, left in enumerate(open_needs) if left == 0]
    done = 0
    while ready:
        row = ready.pop()
        done += 1
        for other in users[first[row] : first[row + 1]]:
            open_needs[other] -= 1
            if not open_needs[other]:
                ready.append(other)
    if done < count:
        stuck = int(trace.nodes["id"][next(row for row, left in enumerate(open_needs) if left)])
        raise TraincastError(f"'{trace.path}' has dependencies in a circle, node {stuck} among them")


_RAW = msgspec.Raw(b"")
_COMMUNICATES = re.compile(r"record_param_comms|c10d|nccl", re.IGNORECASE)
NODE_ARRAYS = ("nodes", "workload_graph")
"""Where the nodes are in PyTorch's document, and in Chakra's workload graph."""

_SCHEMA = re.compile(r"1\.[01]\.\d+")


class Side(msgspec.Struct, gc=False):
    """Inputs or outputs of a node since schema 1.0.2."""

    values: msgspec.Raw = _RAW
    shapes: msgspec.Raw = _RAW
    types: msgspec.Raw = _RAW


class Attribute(msgspec.Struct, gc=False):
    """A named attribute of a node since schema 1.0.2."""

    name: str
    value: Any = None


class NewNode(msgspec.Struct, gc=False):
    """A node since schema 1.0.2; `ctrl_deps` is the node it was called from."""

    id: Int
    name: str
    ctrl_deps: Int
    inputs: Side = msgspec.field(default_factory=Side)
    outputs: Side = msgspec.field(default_factory=Side)
    attrs: list[Attribute] = msgspec.field(default_factory=list)


class OldNode(msgspec.Struct, gc=False):
    """A node of schema 1.0.1."""

    id: Int
    name: str
    parent: Int
    rf_id: Int = -1
    fw_parent: Int = 0
    seq_id: Int = -1
    scope: Int = 0
    tid: Int = 0
    op_schema: str = ""
    inputs: msgspec.Raw = _RAW
    input_shapes: msgspec.Raw = _RAW
    input_types: msgspec.Raw = _RAW
    output_shapes: msgspec.Raw = _RAW
    output_types: msgspec.Raw = _RAW


class GraphNode(msgspec.Struct, gc=False, rename={"id": "Id", "name": "Name", "kind": "NodeType"}):
    """A node of Chakra's workload graph; `runtime` is microseconds."""

    id: Int
    name: str
    kind: Int = 0
    runtime: Annotated[float, msgspec.Meta(ge=0, le=1e15)] = 0
    data_deps: list[Int] = []


Row = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
_DECODERS: dict[type[Any], tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]] = {
    kind: (msgspec.json.Decoder(list[kind]), msgspec.json.Decoder(kind, strict=False))  # type: ignore[valid-type]
    for kind in (NewNode, OldNode, GraphNode)
}


class NodeSink(RowSink):
    """Turns nodes of any dialect into rows; also used for Chakra's protobuf form."""

    WHAT = "nodes"
    MEMBERS = ("schema",)

    def __init__(self) -> None:
        super().__init__(NODE)
        self.schemas: Interner[str] = Interner("op schemas")
        self.schemas[""]  # number 0: none was recorded
        self.needs: list[Any] = []
        self.need_counts: list[int] = []
        self._dialects = list(_DECODERS)

    def add_batch(self, raw: bytes) -> bool:
        """Rows of a whole batch, in the dialect that fits it."""
        for dialect in self._dialects:
            try:
                nodes = _DECODERS[dialect][0].decode(raw)
            except UNREADABLE:
                continue
            self._prefer_dialect(dialect)
            self.seen += len(nodes)
            self.add_rows([self._make_row(node) for node in nodes])
            return True
        return False

    def add_single(self, raw: bytes) -> None:
        """The row of a node in a batch that did not parse."""
        self.seen += 1
        for dialect in self._dialects:
            try:
                node = _DECODERS[dialect][1].decode(raw.decode("utf-8", "replace").encode())
            except UNREADABLE:
                continue
            self.add_rows([self._make_row(node)])
            return
        self.skipped += 1

    def add_rows(self, rows: list[Row]) -> None:
        """Appends rows."""
        self.kept += len(rows)
        if rows:
            self.table.append_block(np.array(rows, dtype=NODE))

    def add_dependencies(self, needs: list[int]) -> None:
        """What the next row depends on."""
        self.needs.append(np.array(needs, dtype=np.int64))
        self.need_counts.append(len(needs))

    def _prefer_dialect(self, dialect: type[Any]) -> None:
        if self._dialects[0] is not dialect:
            self._dialects.remove(dialect)
            self._dialects.insert(0, dialect)

    def _make_row(self, node: NewNode | OldNode | GraphNode) -> Row:
        if isinstance(node, GraphNode):
            self.add_dependencies(node.data_deps)
            duration = round(1000 * node.runtime)
            return (node.id, 0, -1, -1, 0, -1, duration, 0, self.names[node.name], 0, 0, _limit_value(node.kind))
        if isinstance(node, OldNode):
            values = node.inputs if _COMMUNICATES.search(node.name) else _RAW
            details = _encode_arguments(
                values, node.input_shapes, node.input_types, node.output_shapes, node.output_types
            )
            return (
                node.id, node.parent, node.rf_id, node.seq_id, node.fw_parent, -1, -1, node.tid,
                self.names[node.name], self.details[details], self.schemas[node.op_schema], _limit_value(node.scope),
            )  # fmt: skip
        attributes = {attribute.name: attribute.value for attribute in node.attrs}
        values = node.inputs.values if _COMMUNICATES.search(node.name) else _RAW
        sides = (node.inputs.shapes, node.inputs.types, node.outputs.shapes, node.outputs.types)
        return (
            node.id,
            node.ctrl_deps,
            _read_integer(attributes.get("rf_id"), -1),
            _read_integer(attributes.get("seq_id"), -1),
            _read_integer(attributes.get("fw_parent"), 0),
            -1,
            -1,
            _read_integer(attributes.get("tid"), 0),
            self.names[node.name],
            self.details[_encode_arguments(values, *sides)],
            self.schemas[str(attributes.get("op_schema", ""))],
            _limit_value(_read_integer(attributes.get("scope"), 0)),
        )


def _encode_arguments(values: Any, *sides: Any) -> bytes:
    shapes, types, out_shapes, out_types = (side or b"null" for side in sides)
    return b'{"values":%b,"dims":%b,"types":%b,"output_dims":%b,"output_types":%b}' % (
        values or b"null",
        shapes,
        types,
        out_shapes,
        out_types,
    )


def _read_integer(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LIMIT else default


def _limit_value(value: int) -> int:
    return value if abs(value) < 1 << 31 else -1


def read_execution_trace(path: str | Path) -> ExecutionTrace:
    """Reads a PyTorch execution trace or a Chakra workload graph (JSON, plain or gzip)."""
    path = Path(path)
    sink = NodeSink()
    ended = scan_file(path, NODE_ARRAYS, sink)
    return finish_trace(path, sink, str(sink.members.get("schema", "")), ended)


def finish_trace(path: Path, sink: NodeSink, schema: str, ended: str) -> ExecutionTrace:
    """The trace from its rows, checked."""
    notes = sink.check_rows(path, ended, "no nodes of an execution trace")
    if schema and not _SCHEMA.match(schema):
        notes.append(f"schema {schema[:40]!r} is not one this reader was checked with (1.0.1 to 1.1.x)")
    nodes = sink.table.finish_table()
    repeated = len(nodes) - len(np.unique(nodes["id"]))
    if repeated:
        notes.append(f"{repeated} node ids occur more than once; the first of each counts")
    counts = sink.need_counts or [0] * len(nodes)
    trace = ExecutionTrace(
        path=path,
        schema=schema,
        nodes=nodes,
        names=tuple(map(escape_text, sink.names)),
        details=tuple(sink.details),
        schemas=tuple(sink.schemas),
        needs=np.concatenate(sink.needs) if sink.needs else np.empty(0, dtype=np.int64),
        needs_ptr=np.array([0, *accumulate(counts)], dtype=np.int64),
        notes=tuple(notes),
    )
    check_acyclic(trace)
    return trace


_LOOKED_AT = 500  # ops: files of one run agree in all of them but where one cut a list short


def join_execution(linked: Linked, execution: ExecutionTrace) -> IntArray:
    """The node of the execution trace behind every op, or -1: by record function id, else by order and name.

    Traces from before record function ids were written have the ops of both files in the same order per name.
    """
    trace, nodes = linked.trace, execution.nodes
    joined = np.full(len(trace.events), -1, dtype=np.int64)
    ops = linked.host[trace.events["kind"][linked.host] != Kind.RUNTIME]
    ids = trace.events["record_function"][ops]
    if (ids > 0).any():
        order = np.argsort(nodes["record_function"], kind="stable")
        found = np.where(ids > 0, find_rows(nodes["record_function"][order], order, ids), -1)
        joined[ops] = np.where(_have_same_names(linked, execution, ops, found), found, -1)
        return joined
    by_name: dict[str, list[int]] = {}
    for row in np.argsort(nodes["record_function"], kind="stable").tolist():
        by_name.setdefault(execution.names[nodes["name"][row]], []).append(row)
    ops_by_name: dict[str, list[int]] = {}
    for row in ops.tolist():
        ops_by_name.setdefault(linked.get_name(row), []).append(row)
    for name, rows in ops_by_name.items():
        if len(by_name.get(name, ())) == len(rows):
            joined[rows] = by_name[name]
    return joined


def _have_same_names(linked: Linked, execution: ExecutionTrace, ops: IntArray, nodes: IntArray) -> BoolArray:
    """Which ops are called as their nodes are: ids of another run mean other ops."""
    number = {name: index for index, name in enumerate(linked.trace.names)}
    known = np.array([number.get(escape_text(name), -1) for name in execution.names] or [-1], dtype=np.int64)
    named = known[execution.nodes["name"][np.maximum(nodes, 0)]] if len(execution.nodes) else np.full(len(ops), -1)
    return np.asarray(named == linked.events["name"][ops])


def compute_shape_mismatch(linked: Linked, execution: ExecutionTrace, joined: IntArray) -> float:
    """The share of joined ops whose shapes differ in the two files; looked at are the first that recorded any."""
    differ = seen = 0
    for row in np.flatnonzero(joined >= 0).tolist():
        ours = parse_arguments(linked.trace.details[int(linked.events["details"][row])])
        theirs = parse_arguments(execution.details[execution.nodes["details"][joined[row]]])
        if ours is None or theirs is None or not ours.tensors or not theirs.tensors:
            continue
        seen += 1
        differ += [spec.shape for spec in ours.tensors] != [spec.shape for spec in theirs.tensors]
        if seen == _LOOKED_AT:
            break
    return differ / seen if seen else 0.0

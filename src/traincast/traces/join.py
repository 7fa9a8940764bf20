"""The ops of a timeline found in the execution trace of the same run."""

from __future__ import annotations

import numpy as np

from traincast.traces.arguments import parse_arguments
from traincast.traces.events import Kind
from traincast.traces.execution import ExecutionTrace, find_rows
from traincast.traces.link import Linked
from traincast.utils.arrays import BoolArray, IntArray
from traincast.utils.errors import escape_text

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

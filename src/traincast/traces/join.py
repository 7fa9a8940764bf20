"""The ops of a timeline found in the execution trace of the same run."""

from __future__ import annotations

import numpy as np

from traincast.arrays import IntArray
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.nodes import ExecutionTrace, rows_of


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
        joined[ops] = np.where(ids > 0, rows_of(nodes["record_function"][order], order, ids), -1)
        return joined
    by_name: dict[str, list[int]] = {}
    for row in np.argsort(nodes["record_function"], kind="stable").tolist():
        by_name.setdefault(execution.names[nodes["name"][row]], []).append(row)
    ops_by_name: dict[str, list[int]] = {}
    for row in ops.tolist():
        ops_by_name.setdefault(linked.name(row), []).append(row)
    for name, rows in ops_by_name.items():
        if len(by_name.get(name, ())) == len(rows):
            joined[rows] = by_name[name]
    return joined

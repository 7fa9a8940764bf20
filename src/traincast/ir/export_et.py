"""A rank's program as a PyTorch execution trace (JSON, the schema of `torch.profiler.ExecutionTraceObserver`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from traincast.ir.trace_nodes import Arguments, TraceNode, list_trace_nodes, select_program
from traincast.ir.workload import Workload
from traincast.utils.files.writing import write_bytes

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

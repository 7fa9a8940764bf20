#!/usr/bin/env python
"""Writes docs/tutorial/example-trace.json: four steps of a small MLP in the form of a Kineto trace.

The times are made up (a real trace would need a GPU), the form is what `torch.profiler` writes: ops with their input
shapes, launch calls inside them, kernels that carry the launch's correlation id. Run it again after a change; a test
compares the file with what this writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial" / "example-trace.json"
STEPS = 4
BATCH = 1024
WIDTHS = (256, 1024, 1024, 1)
"""Features of the input and of every layer's output."""
LAUNCH_US = 6
"""Duration of a launch call on the host."""
BEFORE_LAUNCH_US, AFTER_LAUNCH_US, BETWEEN_OPS_US = 26, 11, 9
"""Host time of an op before its launch and after it, and between two ops."""
DEVICE_DELAY_US = 4
"""From the end of a launch call to the earliest start of its kernel."""
HOST, DEVICE, STREAM = 4242, 0, 7
"""Process and thread of the host, process of the device, its stream."""

Event = dict[str, Any]


class Op(NamedTuple):
    """One op of the step: the host op a profiler shows, the op inside it, its inputs, its kernel."""

    scope: str
    name: str
    shapes: list[list[int]]
    kernel: str
    kernel_us: int


def step_ops() -> list[Op]:
    """Forward, loss, backward and update of the MLP, in the order in which the host issues them."""
    layers = list(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
    ops = []
    for number, (inputs, outputs) in enumerate(layers):
        shapes = [[outputs], [BATCH, inputs], [inputs, outputs], [], []]
        ops.append(Op("aten::linear", "aten::addmm", shapes, "volta_sgemm_128x64_tn", _product_us(inputs, outputs)))
        if number < len(layers) - 1:
            ops.append(_elementwise("aten::relu", "aten::clamp_min", [[BATCH, outputs], []]))
    ops.append(_elementwise("aten::mse_loss", "aten::mse_loss", [[BATCH, 1], [BATCH, 1], []]))
    for number, (inputs, outputs) in reversed(list(enumerate(layers))):
        weight = [[outputs, BATCH], [BATCH, inputs]]
        ops.append(Op("AddmmBackward0", "aten::mm", weight, "volta_sgemm_64x64_nt", _product_us(inputs, outputs)))
        if number:
            data = [[BATCH, outputs], [outputs, inputs]]
            ops.append(Op("AddmmBackward0", "aten::mm", data, "volta_sgemm_128x64_nn", _product_us(inputs, outputs)))
            ops.append(
                _elementwise("ReluBackward0", "aten::threshold_backward", [[BATCH, inputs], [BATCH, inputs], []])
            )
    ops += [_elementwise("aten::add_", "aten::add_", [[o, i], [o, i], []]) for i, o in layers]
    return ops


def _product_us(inputs: int, outputs: int) -> int:
    """A GEMM at 11 TFLOPS, at least 6 us."""
    return max(6, round(2 * BATCH * inputs * outputs / 11e6))


def _elementwise(scope: str, name: str, shapes: list[list[int]]) -> Op:
    """An element-wise op at 700 GB/s on top of a start of 3 us."""
    rows, columns = shapes[0]
    return Op(scope, name, shapes, "vectorized_elementwise_kernel", 3 + round(3 * 4 * rows * columns / 700e3))


def trace_events() -> list[Event]:
    """All steps one after the other; every step ends with a synchronisation."""
    events: list[Event] = []
    clock, correlation = 1_700_000_000_000_000, 1
    for step in range(STEPS):
        begin, device_free = clock, clock
        for op in step_ops():
            events += _op_events(op, clock, correlation, device_free)
            device_free = events[-1]["ts"] + events[-1]["dur"]
            clock += BEFORE_LAUNCH_US + LAUNCH_US + AFTER_LAUNCH_US + BETWEEN_OPS_US
            correlation += 1
        wait = max(5, device_free - clock + 2)
        events.append(_event("cuda_runtime", "cudaDeviceSynchronize", HOST, clock, wait, correlation=correlation))
        clock, correlation = clock + wait + 20, correlation + 1
        events.append(_event("user_annotation", f"ProfilerStep#{step + 1}", HOST, begin, clock - begin))
    return events


def _op_events(op: Op, clock: int, correlation: int, device_free: int) -> list[Event]:
    """The host op, the op inside it, the launch call and, last, the kernel."""
    length = BEFORE_LAUNCH_US + LAUNCH_US + AFTER_LAUNCH_US
    types = ["float" if shape else "Scalar" for shape in op.shapes]
    shapes = {"Input Dims": op.shapes, "Input type": types, "External id": correlation}
    launch = clock + BEFORE_LAUNCH_US
    start = max(device_free + 1, launch + LAUNCH_US + DEVICE_DELAY_US)
    link = {"External id": correlation, "correlation": correlation}
    return [
        *([] if op.scope == op.name else [_event("cpu_op", op.scope, HOST, clock, length)]),
        _event("cpu_op", op.name, HOST, clock + 1, length - 2, **shapes),
        _event("cuda_runtime", "cudaLaunchKernel", HOST, launch, LAUNCH_US, **link),
        _event("kernel", op.kernel, DEVICE, start, op.kernel_us, stream=STREAM, device=DEVICE, **link),
    ]


def _event(category: str, name: str, process: int, start: int, duration: int, **arguments: Any) -> Event:
    thread = STREAM if process == DEVICE else HOST
    place = {"pid": process, "tid": thread, "ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **place, "args": arguments}


def trace_text() -> str:
    """The file: one event per line."""
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "Tesla V100-SXM2-16GB"}]}
    events = ",\n".join(json.dumps(event) for event in trace_events())
    return json.dumps(head)[:-1] + ', "traceEvents": [\n' + events + "\n]}\n"


if __name__ == "__main__":
    PAGE.write_text(trace_text(), encoding="utf-8")

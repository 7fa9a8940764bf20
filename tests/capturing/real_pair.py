"""One step on two real processes with gloo, as rank 0 sees it: PyTorch's execution trace and its memory.

Run as a module, `python -m tests.capturing.real_pair MODULE:FUNCTION FOLDER RANK`: FUNCTION(rank, device) makes the
step; rank 0 writes FOLDER/result.json.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.capturing.oracle import Node, Peak, execution_trace, live_tensors, profiled_peak, tensors_of
from tests.conftest import ROOT
from traincast.ir import Op, Program

WORLD = 2


@dataclass
class Real:
    """What rank 0 did and held."""

    trace: list[Node]
    peak: Peak


def real_pair(function: str, folder: Path) -> Real:
    """Runs the step that `MODULE:FUNCTION` makes on two processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.capturing.real_pair", function, str(folder)]
    started = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(WORLD)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * WORLD, "\n".join(error[-3000:] for error in errors)
    result = json.loads((folder / "result.json").read_text())
    return Real(_nodes(result["trace"]), Peak(**result["peak"]))


def _nodes(entries: list[dict[str, Any]]) -> list[Node]:
    """Without what gloo does itself, being waited for: it reduces everything and takes its part of it."""
    ours = [entry for entry in entries if not entry["name"].startswith("gloo:")]  # its threads mark them at any time
    nodes = [Node(**{**entry, "children": _nodes(entry["children"])}) for entry in ours]
    names = [node.name for node in nodes]
    ends = [i + 1 for i, name in enumerate(names) if name == "c10d::_reduce_scatter_base_"]
    own = {place for i in ends if names[i : i + 2] == ["aten::chunk", "aten::copy_"] for place in (i, i + 1)}
    return [node for i, node in enumerate(nodes) if i not in own]


def device_ops(program: Program) -> list[Op]:
    """What a program runs but for what orders its streams, which a CPU does not have."""
    return [op for op in program.ops if not op.name.startswith("cuda::")]


def exchanged(program: Program) -> list[tuple[Any, ...]]:
    """Name, bytes and splits of every collective, as captured."""
    told = [(op.name, dict(op.signature.scalars)) for op in program.ops if op.name.startswith("c10d::")]
    return [(name, it["bytes"], it.get("send_splits"), it.get("recv_splits")) for name, it in told]


def real_exchanged(trace: list[Node]) -> list[tuple[Any, ...]]:
    """The same of a trace: bytes of the larger buffer, or for an all-to-all of what is sent."""
    return [_told(node) for top in trace for node in top.all() if node.name.startswith("c10d::")]


def _told(node: Node) -> tuple[Any, ...]:
    sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in tensors_of(node)]
    if node.name != "c10d::alltoall_base_":
        return node.name, max(sizes), None, None
    received, sent = sizes
    splits = [[rows * size // max(1, sum(counts)) for rows in counts] or [size // WORLD] * WORLD
              for counts, size in zip(node.values[3:5], (received, sent), strict=True)]  # fmt: skip
    if len({*splits[0], *splits[1]}) == 1:
        return node.name, sent, None, None
    return node.name, sent, tuple(splits[1]), tuple(splits[0])


def _run(function: str, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    own = Path(folder) / str(rank)
    own.mkdir()
    module, _, name = function.partition(":")
    gc.collect()
    before = {id(t) for t in live_tensors()}
    with sdpa_kernel(SDPBackend.MATH):
        step = getattr(import_module(module), name)(rank, "cpu")
        trace = execution_trace(step, own, threads=1)
        for tensor in live_tensors():
            if tensor.is_leaf:
                tensor.grad = None  # those of the run before are no part of what is held
        gc.collect()
        peak = profiled_peak(step, [t for t in live_tensors() if id(t) not in before and type(t).__name__ != "DTensor"])
    if rank == 0:
        result = {"trace": [asdict(node) for node in trace], "peak": asdict(peak)}
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
